// Package vision receives photos of devices. A camera tool makes the device POST a JPEG to
// the URL of its `initialize` request, with the bearer token in it (esp32_camera.cc:172-339
// of xiaozhi-esp32 v2.4.2); the response body becomes the result of the tool, unchanged. A
// screen snapshot is sent to a single-use URL, which contains its own proof
// (mcp_server.cc:204-250).
//
// Uploads are streamed into a JetStream object store with one chunk in memory each, and
// checked at the same time: a picture becomes visible with its last step or not at all. Any
// node can receive and serve any photo.
package vision

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Paths of the device side.
const (
	PathExplain  = "/xiaozhi/vision/explain"
	PathSnapshot = "/xiaozhi/snapshot/"
)

// Limits of uploads. The device waits 30 s for the response, blocked, and hangs on a
// response of 8 KiB (http_client.cc:258-276).
const (
	MaxUpload      = 4 << 20 // bytes of the JPEG
	MaxQuestion    = 4 << 10 // bytes
	MaxSide        = 8192    // pixels
	MaxUploads     = 64      // in progress; more get 503
	MaxPerDevice   = 2       // per device
	MaxPerAddress  = 48      // per address (IPv6: a /64 network)
	MaxSlowUploads = 4       // of devices with a slow upload within SlowTime
	SlowTime       = 5 * time.Minute
	slowGrace      = 5 * time.Second  // before the minimum rate applies
	maxSlowDevices = 10_000           // devices remembered as slow
	MaxReading     = 32               // photos in memory for readers of the API; more wait
	MaxPerReader   = 8                // of them, of one reader
	MaxFetching    = 2                // photos read from the store in one moment; more wait
	UploadTime     = 30 * time.Second // from the request to its last byte
	GrantLife      = 24 * time.Hour   // of an upload token
	SnapshotLife   = 10 * time.Minute // of a snapshot address
	chunkSize      = 128 << 10        // of the object store, and memory per upload
	overhead       = 64 << 10         // of multipart, beyond the parts
	storeTime      = 8 * time.Second  // for one step of the object store: two fit after the last byte
)

// Kinds of photos.
const (
	KindCamera   = "camera"
	KindSnapshot = "snapshot"
)

// Options of a Server.
type Options struct {
	Mint      *credential.Mint
	JetStream jetstream.JetStream
	Bucket    string // object store, created on first use
	Index     Index  // of the stored photos
	// Retention and Limit limit the stored photos by age and bytes; when the store is full,
	// the oldest are removed.
	Retention time.Duration
	Limit     int64
	Replicas  int // of the bucket; 0 means 1
	PerDevice int // concurrent uploads of one device; 0 means MaxPerDevice
	// PerAddress is the limit of one address; 0 means MaxPerAddress. Requests of
	// TrustedProxies count for the address that they name.
	PerAddress     int
	TrustedProxies []netip.Prefix
	// MinRate is the minimum rate of an upload in bytes per second; 0: only UploadTime applies.
	MinRate int64
	// PublicURL is the http or https base under which devices reach this node, without a
	// trailing slash. Empty: photos are not offered.
	PublicURL string
	// Chat explains photos if it has a URL; otherwise a service that responds on Subject
	// does, if that is not empty.
	Chat    ChatOptions
	Subject string
	// Failures slows down clients that try tokens; may be nil.
	Failures *connlimit.Failures
	Log      *slog.Logger
}

// Index is the index of the stored photos, by device and time. Its errors are those of
// fleet.Records.
type Index interface {
	// Add adds photos; existing entries stay unchanged.
	Add(ctx context.Context, photos ...devices.Photo) error
	Remove(ctx context.Context, ids ...string) error
	// Page returns photos newest first, with ids before before (unless it is empty) and not before from.
	Page(ctx context.Context, device devices.ID, before, from string, limit int) ([]devices.Photo, error)
	// Expire removes the photos with ids before an id.
	Expire(ctx context.Context, before string) (removed int, err error)
}

// Core contains the methods of fleet.Service that the receiver needs.
type Core interface {
	MayBeMember(id devices.ID) bool
	Publish(e devices.Event)
}

// Server receives and serves photos. It implements fleet.Vision and is safe for concurrent
// use.
type Server struct {
	opt    Options
	core   atomic.Pointer[Core]
	bucket *bucket
	slots  chan struct{}
	// reading contains one element for each open photo.
	reading     chan struct{}
	readersLock sync.Mutex
	readers     map[string]*readerPlaces // that read photos or wait to
	fetching    connlimit.Places         // of photos that are read from the store

	explanations *explanations
	// missing wakes Keep: a photo is missing in the index.
	missing chan struct{}

	// devices and addresses have uploads in progress: one of them must not use the slots of all others.
	devices   *connlimit.Shares[devices.ID]
	addresses *connlimit.Shares[netip.Addr]
	slow      chan struct{} // slots of slow devices

	mu         sync.Mutex
	slowUntil  map[devices.ID]time.Time // devices with a slow upload
	uploadTime time.Duration            // UploadTime, less in tests
	slowGrace  time.Duration            // slowGrace, less in tests
	budget     time.Duration            // ExplainTime, less in tests

	// Uploads counts uploads by outcome: stored, or the reason of the refusal.
	Uploads counters.Map[string]
	// Bytes counts the bytes of stored photos; InProgress is the number of current uploads.
	Bytes      atomic.Uint64
	InProgress atomic.Int64
	// Explanations counts questions by outcome, ExplainTime measures how long devices
	// waited, and Explaining is the number of photos being explained.
	Explanations counters.Map[string]
	ExplainTime  counters.Histogram
	Explaining   atomic.Int64
}

// New returns a Server. It refuses uploads until Attach.
func New(opt Options) *Server {
	s := &Server{opt: opt, bucket: newBucket(opt), slots: make(chan struct{}, MaxUploads), reading: make(chan struct{}, MaxReading), readers: map[string]*readerPlaces{}, fetching: make(connlimit.Places, MaxFetching), missing: make(chan struct{}, 1),
		devices: connlimit.NewShares[devices.ID](cmp.Or(opt.PerDevice, MaxPerDevice)), addresses: connlimit.NewShares[netip.Addr](cmp.Or(opt.PerAddress, MaxPerAddress)), slow: make(chan struct{}, MaxSlowUploads), slowUntil: map[devices.ID]time.Time{}, uploadTime: UploadTime, slowGrace: slowGrace, budget: ExplainTime}
	var ask explainer
	switch {
	case opt.Chat.URL != "":
		ask = newChat(opt.Chat, s.content)
	case opt.Subject != "":
		ask = &responder{conn: opt.JetStream.Conn(), subject: opt.Subject, bucket: opt.Bucket}
	}
	s.explanations = newExplanations(ask)
	return s
}

// Attach sets the core, which is created after the server.
func (s *Server) Attach(core Core) { s.core.Store(&core) }

// Register registers the routes for devices.
func (s *Server) Register(mux *http.ServeMux) {
	mux.HandleFunc("POST "+PathExplain, s.explain)
	mux.HandleFunc("POST "+PathSnapshot+"{token}", s.snapshot)
}

// Grant implements fleet.Vision: it returns the upload URL, and a token for GrantLife.
func (s *Server) Grant(id devices.ID, now time.Time) (url, token string, expires time.Time) {
	if s.opt.PublicURL == "" {
		return "", "", time.Time{}
	}
	expires = now.Add(GrantLife).Truncate(time.Second)
	return s.opt.PublicURL + PathExplain, s.opt.Mint.UploadToken(string(id), expires), expires
}

// Snapshot implements fleet.Vision: it returns a URL that accepts one upload within
// SnapshotLife, and the id of its photo.
func (s *Server) Snapshot(id devices.ID, now time.Time) (url, photo string) {
	photo = newPhotoID(now)
	return s.opt.PublicURL + PathSnapshot + s.opt.Mint.SnapshotToken(string(id), photo, now.Add(SnapshotLife)), photo
}

const (
	idLength   = 20
	idTime     = 9 // characters of milliseconds: enough for three thousand years
	idAlphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
)

// newPhotoID returns idLength characters of [a-z0-9] that sort by time.
func newPhotoID(now time.Time) string {
	id := []byte(idAt(now))
	var b [idLength - idTime]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	for _, c := range b {
		id = append(id, idAlphabet[int(c)%len(idAlphabet)]) // a little less than 57 random bits, after the time
	}
	return string(id)
}

// idAt returns the prefix of the ids of that time.
func idAt(t time.Time) string {
	return fmt.Sprintf("%0*s", idTime, strconv.FormatInt(max(t.UnixMilli(), 0), len(idAlphabet)))
}

func isPhotoID(id string) bool {
	return len(id) == idLength && strings.Trim(id, idAlphabet) == ""
}

// Reasons of refusals. Each has a counter.
const (
	reasonBadRequest   = "bad_request"
	reasonUnauthorized = "unauthorized"
	reasonTooMany      = "too_many"
	reasonTooLarge     = "too_large"
	reasonNotJPEG      = "not_jpeg"
	reasonUsed         = "used"
	reasonSlow         = "slow"
	reasonBroken       = "broken"
	reasonBusy         = "busy"
	reasonUnavailable  = "unavailable"
	outcomeStored      = "stored"
)

// refusal describes why an upload was refused. The device returns the message to the caller
// that requested the photo.
type refusal struct {
	status          int
	reason, message string
	cause           error // for the log; nil if only the device is the cause
}

func (r *refusal) Error() string { return r.message }

func (r *refusal) Unwrap() error { return r.cause }

func refuse(status int, reason, format string, args ...any) *refusal {
	return &refusal{status: status, reason: reason, message: fmt.Sprintf(format, args...)}
}

func unavailable(cause error) *refusal {
	return &refusal{http.StatusServiceUnavailable, reasonUnavailable, "the photo store does not answer; try again later", cause}
}

// explain handles a camera's upload.
func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	id, err := devices.ParseID(r.Header.Get("Device-Id"))
	if err != nil {
		s.answer(w, r, upload{}, answer{}, refuse(http.StatusBadRequest, reasonBadRequest, "invalid Device-Id header: %v", err))
		return
	}
	now := clock.Now()
	token, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if err := s.opt.Mint.VerifyUpload(token, string(id), now); !found || err != nil {
		s.answer(w, r, upload{}, answer{}, s.unauthorized(r, err, "the upload token is not valid"))
		return
	}
	s.receive(w, r, upload{device: id, photo: newPhotoID(now), kind: KindCamera, taken: now})
}

// snapshot handles a screen's upload.
func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) {
	now := clock.Now()
	device, photo, err := s.opt.Mint.VerifySnapshot(r.PathValue("token"), now)
	if err != nil || !isPhotoID(photo) {
		s.answer(w, r, upload{}, answer{}, s.unauthorized(r, err, "this upload URL is invalid or has expired"))
		return
	}
	s.receive(w, r, upload{device: devices.ID(device), photo: photo, kind: KindSnapshot, taken: now})
}

// unauthorized refuses a token. An expired token does not count as a failed attempt.
func (s *Server) unauthorized(r *http.Request, err error, message string) *refusal {
	if !errors.Is(err, credential.ErrExpired) && s.opt.Failures.FailedRequest(r) {
		return refuse(http.StatusTooManyRequests, reasonTooMany, "too many wrong tokens from this address; try again later")
	}
	return refuse(http.StatusUnauthorized, reasonUnauthorized, "%s", message)
}

// upload describes an admitted upload.
type upload struct {
	device   devices.ID
	photo    string
	kind     string
	taken    time.Time
	question string
}

func (s *Server) receive(w http.ResponseWriter, r *http.Request, u upload) {
	core := s.core.Load()
	if core == nil {
		s.answer(w, r, u, answer{}, refuse(http.StatusServiceUnavailable, reasonUnavailable, "this node is starting; try again"))
		return
	}
	if !(*core).MayBeMember(u.device) {
		s.answer(w, r, u, answer{}, refuse(http.StatusUnauthorized, reasonUnauthorized, "the device is not a member of this fleet"))
		return
	}
	if !s.devices.Acquire(u.device) {
		s.answer(w, r, u, answer{}, refuse(http.StatusServiceUnavailable, reasonBusy, "too many uploads of this device are in progress; try again"))
		return
	}
	defer s.devices.Release(u.device)
	addr := connlimit.AddressKey(connlimit.ClientAddress(r, s.opt.TrustedProxies))
	if !s.addresses.Acquire(addr) {
		s.answer(w, r, u, answer{}, refuse(http.StatusServiceUnavailable, reasonBusy, "too many uploads from this address are in progress; try again"))
		return
	}
	taken, err := s.storeInSlot(w, r, &u)
	s.addresses.Release(addr) // an explanation needs no slot
	if err != nil {
		if refused, ok := errors.AsType[*refusal](err); ok && refused.reason == reasonSlow {
			s.markSlow(u.device, time.Now())
		}
		s.answer(w, r, u, answer{}, err)
		return
	}
	s.Uploads.Add(outcomeStored, 1)
	s.Bytes.Add(uint64(taken.bytes))
	s.addToIndex(r.Context(), devices.Photo{ID: u.photo, Device: u.device, Question: u.question, Bytes: taken.bytes, SHA256: taken.sha256, Kind: u.kind, TakenAt: u.taken})
	(*core).Publish(photoEvent(u, taken.bytes))
	response := answer{Success: true, Photo: u.photo}
	if u.kind == KindCamera {
		response.Text, response.Message = s.explainPhoto(r.Context(), question{u.device, u.photo, u.question, taken.bytes, taken.sha256}, taken.receivedBy.Add(s.budget))
	}
	s.answer(w, r, u, response, nil)
}

// storeInSlot stores the upload in a slot for uploads; explanations take longer and have their own
// slots.
func (s *Server) storeInSlot(w http.ResponseWriter, r *http.Request, u *upload) (storedPhoto, error) {
	if s.isSlow(u.device, time.Now()) {
		select {
		case s.slow <- struct{}{}:
			defer func() { <-s.slow }()
		default:
			return storedPhoto{}, refuse(http.StatusServiceUnavailable, reasonBusy, "the last upload of this device was too slow, and too many slow uploads are in progress; try again")
		}
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	default:
		return storedPhoto{}, refuse(http.StatusServiceUnavailable, reasonBusy, "%d uploads are already in progress; try again", MaxUploads)
	}
	s.InProgress.Add(1)
	defer s.InProgress.Add(-1)
	return s.store(w, r, u)
}

// markSlow records that an upload of a device was slower than the minimum rate.
func (s *Server) markSlow(id devices.ID, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.slowUntil) >= maxSlowDevices {
		maps.DeleteFunc(s.slowUntil, func(_ devices.ID, until time.Time) bool { return now.After(until) })
	}
	if len(s.slowUntil) < maxSlowDevices {
		s.slowUntil[id] = now.Add(SlowTime)
	}
}

func (s *Server) isSlow(id devices.ID, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return now.Before(s.slowUntil[id])
}

func photoEvent(u upload, size int64) devices.Event {
	fields := jsonspan.AppendString([]byte(`"photo":`), u.photo)
	fields = jsonspan.AppendString(append(fields, `,"question":`...), u.question)
	fields = strconv.AppendInt(append(fields, `,"bytes":`...), size, 10)
	return devices.Event{Kind: devices.EventPhoto, Device: u.device, Time: u.taken, MsgID: u.device.Token() + "-photo-" + u.photo, Fields: fields}
}

// answer is the response to the device. The firmware makes it the result of the tool,
// unchanged.
type answer struct {
	Success bool   `json:"success"`
	Photo   string `json:"photo,omitempty"`
	Text    string `json:"text,omitempty"` // the explanation
	Message string `json:"message,omitempty"`
}

// answer ends an upload. It counts refusals, and logs only errors of the server.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, u upload, response answer, err error) {
	status := http.StatusOK
	if err != nil {
		refused := (*refusal)(nil)
		if !errors.As(err, &refused) {
			refused = unavailable(err)
		}
		s.Uploads.Add(refused.reason, 1)
		if refused.cause != nil && !errors.Is(refused.cause, context.Canceled) {
			s.opt.Log.Warn("photo upload failed", "device", u.device, "remote", r.RemoteAddr, "reason", refused.reason, "error", refused.cause)
		}
		response, status = answer{Message: refused.message}, refused.status
		switch status {
		case http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", `Bearer realm="fleetd"`)
		case http.StatusServiceUnavailable, http.StatusTooManyRequests:
			w.Header().Set("Retry-After", "10")
		}
	}
	var body bytes.Buffer
	text := json.NewEncoder(&body)
	text.SetEscapeHTML(false)                     // otherwise an explanation could become six times as long
	if err := text.Encode(response); err != nil { // cannot fail for texts and a bool
		status = http.StatusInternalServerError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(bytes.TrimSuffix(body.Bytes(), []byte("\n"))) // fails only if the device has disconnected
}
