// Package vision receives what devices photograph. A camera tool makes the
// device POST a JPEG to the address that `initialize` gave it, with the bearer
// token it got there (esp32_camera.cc:172-339 of xiaozhi-esp32 v2.4.2); the
// answer's body, word for word, becomes the result of the tool. A screen
// snapshot goes to an address of one use, which carries its own proof
// (mcp_server.cc:204-250).
//
// Uploads stream into a JetStream object store, one chunk in memory each, and
// are checked on the way: a picture becomes visible with its last step or not
// at all. Any node can take one and any node can serve it.
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

	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/lobby"
)

// Paths of the device side.
const (
	PathExplain  = "/xiaozhi/vision/explain"
	PathSnapshot = "/xiaozhi/snapshot/"
)

// Limits of uploads. The device waits 30 s for its answer, doing nothing else
// meanwhile, and hangs for ever on one of 8 KiB (http_client.cc:258-276).
const (
	MaxUpload    = 4 << 20 // bytes of the JPEG
	MaxQuestion  = 4 << 10 // bytes
	MaxSide      = 8192    // pixels
	MaxUploads   = 64      // in progress; more get 503
	MaxOfDevice  = 2       // of them, of one device
	MaxOfAddress = 48      // of one address (IPv6: one /64)
	MaxSlow      = 4       // of devices whose upload was too slow within SlowTime
	SlowTime     = 5 * time.Minute
	slowGrace    = 5 * time.Second  // before an upload has to keep its rate
	maxSlowKnown = 10_000           // devices that are remembered as slow
	MaxReading   = 32               // photos that are read at once; more wait
	UploadTime   = 30 * time.Second // from the request to its last byte
	GrantLife    = 24 * time.Hour   // of an upload token
	SnapshotLife = 10 * time.Minute // of a snapshot address
	chunkSize    = 128 << 10        // of the object store, and memory per upload
	overhead     = 64 << 10         // of multipart, beyond the parts
	storeTime    = 8 * time.Second  // for one step of the object store: two fit behind the last byte
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
	Bucket    string // object store, made when first needed
	Index     Index  // of the stored photos
	// Retention and Limit bound the stored photos by age and bytes; when they
	// are full the oldest make room.
	Retention time.Duration
	Limit     int64
	Replicas  int // of the bucket; 0 means 1
	PerDevice int // uploads of one device at once; 0 means MaxOfDevice
	// PerAddress are those of one address; 0 means MaxOfAddress. What comes from
	// TrustedProxies has the address that they name.
	PerAddress     int
	TrustedProxies []netip.Prefix
	// MinRate is how slow an upload may be, in bytes per second; 0: UploadTime alone counts.
	MinRate int64
	// PublicURL is the http or https base under which devices reach this node,
	// without a slash at its end. Empty: photos are not offered.
	PublicURL string
	// Chat explains photos if it has a URL, else whoever responds on Subject
	// does, if that is not empty.
	Chat    ChatOptions
	Subject string
	// Failures slows down who tries tokens; nil does not.
	Failures *lobby.Failures
	Log      *slog.Logger
}

// Index is the index of the stored photos, by device and time. Errors are those
// of fleet.Records.
type Index interface {
	// Add puts photos in; those that are there stay as they are.
	Add(ctx context.Context, photos ...devices.Photo) error
	Remove(ctx context.Context, ids ...string) error
	// Page returns photos newest first: before an id unless it is empty, down to from.
	Page(ctx context.Context, device devices.ID, before, from string, limit int) ([]devices.Photo, error)
	// Expire removes the photos before an id.
	Expire(ctx context.Context, before string) (removed int, err error)
}

// Core is what the receiver needs of fleet.Service.
type Core interface {
	MemberOf(id devices.ID) bool
	Publish(e devices.Event)
}

// Server receives and serves photos. It is fleet.Vision for the core, and
// safe for concurrent use.
type Server struct {
	opt    Options
	core   atomic.Pointer[Core]
	bucket *bucket
	slots  chan struct{}
	// reading are the places of photos that are open.
	reading chan struct{}

	explanations *explanations
	// missing wakes Keep: a photo is not in the index.
	missing chan struct{}

	addresses *lobby.Shares // of uploads in progress
	slow      chan struct{} // places of slow devices

	mu        sync.Mutex
	uploading map[devices.ID]int       // in progress
	slowUntil map[devices.ID]time.Time // devices whose upload was too slow
	patience  time.Duration            // UploadTime, less in tests
	slowGrace time.Duration            // slowGrace, less in tests
	budget    time.Duration            // ExplainTime, less in tests

	// Uploads counts them by outcome: stored, or the reason they were refused.
	Uploads counters.Map[string]
	// Bytes counts those of stored photos, InProgress uploads now.
	Bytes      atomic.Uint64
	InProgress atomic.Int64
	// Explanations counts photos by what became of their question, ExplainTime
	// is what the device waited for it, Explaining how many are explained now.
	Explanations counters.Map[string]
	ExplainTime  counters.Histogram
	Explaining   atomic.Int64
}

// New returns a Server. It refuses uploads until Attach.
func New(opt Options) *Server {
	s := &Server{opt: opt, bucket: newBucket(opt), slots: make(chan struct{}, MaxUploads), reading: make(chan struct{}, MaxReading), missing: make(chan struct{}, 1), uploading: map[devices.ID]int{},
		addresses: lobby.NewShares(cmp.Or(opt.PerAddress, MaxOfAddress)), slow: make(chan struct{}, MaxSlow), slowUntil: map[devices.ID]time.Time{}, patience: UploadTime, slowGrace: slowGrace, budget: ExplainTime}
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

// Attach gives the server its core, which needs the server to be built.
func (s *Server) Attach(core Core) { s.core.Store(&core) }

// Register adds the devices' routes.
func (s *Server) Register(mux *http.ServeMux) {
	mux.HandleFunc("POST "+PathExplain, s.explain)
	mux.HandleFunc("POST "+PathSnapshot+"{token}", s.snapshot)
}

// Grant implements fleet.Vision: an address, and a token for GrantLife.
func (s *Server) Grant(id devices.ID, now time.Time) (url, token string, expires time.Time) {
	if s.opt.PublicURL == "" {
		return "", "", time.Time{}
	}
	expires = now.Add(GrantLife).Truncate(time.Second)
	return s.opt.PublicURL + PathExplain, s.opt.Mint.UploadToken(string(id), expires), expires
}

// Snapshot implements fleet.Vision: an address that takes one upload within
// SnapshotLife, and the id its photo will have.
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
		id = append(id, idAlphabet[int(c)%len(idAlphabet)]) // 57 bits less a hair: the time stands before them
	}
	return string(id)
}

// idAt is the beginning of the ids of that time.
func idAt(t time.Time) string {
	return fmt.Sprintf("%0*s", idTime, strconv.FormatInt(max(t.UnixMilli(), 0), len(idAlphabet)))
}

func isPhotoID(id string) bool {
	return len(id) == idLength && strings.Trim(id, idAlphabet) == ""
}

// Reasons of refusals. The list is closed: every value has a counter.
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

// refusal is why an upload was not taken. The device hands the message to
// whoever asked for the photo.
type refusal struct {
	status          int
	reason, message string
	cause           error // for the log; nil if the device alone is to blame
}

func (r *refusal) Error() string { return r.message }

func (r *refusal) Unwrap() error { return r.cause }

func refuse(status int, reason, format string, args ...any) *refusal {
	return &refusal{status: status, reason: reason, message: fmt.Sprintf(format, args...)}
}

func unavailable(cause error) *refusal {
	return &refusal{http.StatusServiceUnavailable, reasonUnavailable, "the photo store does not answer; try again later", cause}
}

// explain takes a camera's upload.
func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	id, err := devices.ParseID(r.Header.Get("Device-Id"))
	if err != nil {
		s.answer(w, r, upload{}, answer{}, refuse(http.StatusBadRequest, reasonBadRequest, "the Device-Id header is unusable: %v", err))
		return
	}
	now := time.Now()
	token, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if err := s.opt.Mint.VerifyUpload(token, string(id), now); !found || err != nil {
		s.answer(w, r, upload{}, answer{}, s.unauthorized(r, err, "the upload token is not valid"))
		return
	}
	s.receive(w, r, upload{device: id, photo: newPhotoID(now), kind: KindCamera, taken: now})
}

// snapshot takes a screen's upload.
func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) {
	now := time.Now()
	device, photo, err := s.opt.Mint.VerifySnapshot(r.PathValue("token"), now)
	if err != nil || !isPhotoID(photo) {
		s.answer(w, r, upload{}, answer{}, s.unauthorized(r, err, "this address is not valid, or not any more"))
		return
	}
	s.receive(w, r, upload{device: devices.ID(device), photo: photo, kind: KindSnapshot, taken: now})
}

// unauthorized refuses a token. One that has merely expired was no attempt.
func (s *Server) unauthorized(r *http.Request, err error, message string) *refusal {
	if !errors.Is(err, credential.ErrExpired) && s.opt.Failures.FailedRequest(r) {
		return refuse(http.StatusTooManyRequests, reasonTooMany, "too many wrong tokens from this address; try again later")
	}
	return refuse(http.StatusUnauthorized, reasonUnauthorized, "%s", message)
}

// upload is one that may begin: who sends it, and what it will be.
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
	if !(*core).MemberOf(u.device) {
		s.answer(w, r, u, answer{}, refuse(http.StatusUnauthorized, reasonUnauthorized, "the device is not a member of this fleet"))
		return
	}
	if !s.enter(u.device) {
		s.answer(w, r, u, answer{}, refuse(http.StatusServiceUnavailable, reasonBusy, "other uploads of this device are in progress already"))
		return
	}
	defer s.leave(u.device)
	addr := lobby.ClientAddress(r, s.opt.TrustedProxies)
	if !s.addresses.Enter(addr) {
		s.answer(w, r, u, answer{}, refuse(http.StatusServiceUnavailable, reasonBusy, "other uploads from this address are in progress already; try again"))
		return
	}
	taken, err := s.take(w, r, &u)
	s.addresses.Leave(addr) // an explanation holds no place
	if err != nil {
		if no := (*refusal)(nil); errors.As(err, &no) && no.reason == reasonSlow {
			s.wasSlow(u.device, time.Now())
		}
		s.answer(w, r, u, answer{}, err)
		return
	}
	s.Uploads.Add(outcomeStored, 1)
	s.Bytes.Add(uint64(taken.bytes))
	s.note(r.Context(), devices.Photo{ID: u.photo, Device: u.device, Question: u.question, Bytes: taken.bytes, SHA256: taken.sha256, Kind: u.kind, TakenAt: u.taken})
	(*core).Publish(photoEvent(u, taken.bytes))
	said := answer{Success: true, Photo: u.photo}
	if u.kind == KindCamera {
		said.Text, said.Message = s.explained(r.Context(), question{u.device, u.photo, u.question, taken.bytes, taken.sha256}, taken.heard.Add(s.budget))
	}
	s.answer(w, r, u, said, nil)
}

// take stores the upload in one of the places for that; explanations take
// longer and have places of their own.
func (s *Server) take(w http.ResponseWriter, r *http.Request, u *upload) (taken, error) {
	if s.isSlow(u.device, time.Now()) {
		select {
		case s.slow <- struct{}{}:
			defer func() { <-s.slow }()
		default:
			return taken{}, refuse(http.StatusServiceUnavailable, reasonBusy, "the last upload of this device was too slow, and others like it are in progress; try again")
		}
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	default:
		return taken{}, refuse(http.StatusServiceUnavailable, reasonBusy, "%d uploads are in progress already; try again", MaxUploads)
	}
	s.InProgress.Add(1)
	defer s.InProgress.Add(-1)
	return s.store(w, r, u)
}

// enter counts an upload of the device, if it has not enough already: no
// device may take the slots of all others.
func (s *Server) enter(id devices.ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uploading[id] >= cmp.Or(s.opt.PerDevice, MaxOfDevice) {
		return false
	}
	s.uploading[id]++
	return true
}

func (s *Server) leave(id devices.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uploading[id]--; s.uploading[id] == 0 {
		delete(s.uploading, id)
	}
}

// wasSlow notes that an upload of a device did not keep its rate.
func (s *Server) wasSlow(id devices.ID, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.slowUntil) >= maxSlowKnown {
		maps.DeleteFunc(s.slowUntil, func(_ devices.ID, until time.Time) bool { return now.After(until) })
	}
	if len(s.slowUntil) < maxSlowKnown {
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

// answer is what the device reads. The firmware makes it, word for word, the
// result of the tool.
type answer struct {
	Success bool   `json:"success"`
	Photo   string `json:"photo,omitempty"`
	Text    string `json:"text,omitempty"` // the explanation
	Message string `json:"message,omitempty"`
}

// answer ends an upload; the refusals are counted here, and only faults of our
// own side are logged.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, u upload, said answer, err error) {
	status := http.StatusOK
	if err != nil {
		no := (*refusal)(nil)
		if !errors.As(err, &no) {
			no = unavailable(err)
		}
		s.Uploads.Add(no.reason, 1)
		if no.cause != nil && !errors.Is(no.cause, context.Canceled) {
			s.opt.Log.Warn("photo upload failed", "device", u.device, "remote", r.RemoteAddr, "reason", no.reason, "error", no.cause)
		}
		said, status = answer{Message: no.message}, no.status
		switch status {
		case http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", `Bearer realm="fleetd"`)
		case http.StatusServiceUnavailable, http.StatusTooManyRequests:
			w.Header().Set("Retry-After", "10")
		}
	}
	var body bytes.Buffer
	text := json.NewEncoder(&body)
	text.SetEscapeHTML(false)                 // or an explanation could grow to six times its length
	if err := text.Encode(said); err != nil { // texts and a bool encode
		status = http.StatusInternalServerError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(bytes.TrimSuffix(body.Bytes(), []byte("\n"))) // the device is gone if this fails
}
