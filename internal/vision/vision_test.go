package vision

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/racetest"
)

// TestCameraUpload uploads as the firmware does, and reads the photo back.
func TestCameraUpload(t *testing.T) {
	c := newTestServer(t)
	small, big := picture(t, 64), picture(t, 1200)
	if len(big) <= 2*chunkSize {
		t.Fatalf("the big picture has only %d bytes", len(big))
	}
	cases := []struct {
		name, question, body string
		jpeg                 []byte
	}{
		{"small", "what is this?", cameraBody("what is this?", small), small},
		{"several chunks", "桌上有什么?\"\n", cameraBody("桌上有什么?\"\n", big), big},
		{"line break after the end, as ML307 modules send it", "q", cameraBody("q", small) + "\r\n", small},
		{"no question", "", strings.ReplaceAll(snapshotBody(small), snapshotBoundary, cameraBoundary), small},
		{"question last", "later", "--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"file\"; filename=\"camera.jpg\"\r\n\r\n" + string(small) +
			"\r\n--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\nlater\r\n--" + cameraBoundary + "--", small},
		{"unknown part", "q", "--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"mode\"\r\n\r\nfast\r\n" + cameraBody("q", small), small},
		{"zeros after the picture", "q", cameraBody("q", append(bytes.Clone(small), 0, 0, 0)), append(bytes.Clone(small), 0, 0, 0)},
		{"question that is not UTF-8", "a\uFFFDb", cameraBody("a\xffb", small), small},
		{"exactly one chunk", "q", cameraBody("q", pad(small, chunkSize)), pad(small, chunkSize)},
		{"largest", "q", cameraBody(strings.Repeat("q", 1), pad(small, MaxUpload)), pad(small, MaxUpload)},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			begun := time.Now()
			id := c.wire(t, c.cameraHead(robot)+chunked(tc.body, 512)).must(t)
			photo, content := c.content(t, id)
			sum := sha256.Sum256(tc.jpeg)
			want := devices.Photo{ID: id, Device: robot, Question: tc.question, Bytes: int64(len(tc.jpeg)), SHA256: hex.EncodeToString(sum[:]),
				Kind: KindCamera, TakenAt: photo.TakenAt}
			if photo != want || !bytes.Equal(content, tc.jpeg) || photo.TakenAt.Sub(begun.UTC()) > time.Minute || begun.Sub(photo.TakenAt) > time.Millisecond {
				t.Errorf("%+v, %d bytes, want %+v", photo, len(content), want)
			}
			// Other readers of the bucket find an ordinary object.
			objects, err := c.js.ObjectStore(t.Context(), bucketName)
			if err != nil {
				t.Fatal(err)
			}
			info, err := objects.GetInfo(t.Context(), id)
			if err != nil || int(info.Chunks) != (len(tc.jpeg)+chunkSize-1)/chunkSize {
				t.Errorf("%+v, %v", info, err)
			}
			events := c.ports.Seen(devices.EventPhoto)
			event := events[len(events)-1]
			if event.Device != robot || event.MsgID != "aabbccddeeff-photo-"+id ||
				!strings.HasPrefix(string(event.Fields), `"photo":"`+id+`","question":"`) || !strings.HasSuffix(string(event.Fields), fmt.Sprintf(`,"bytes":%d`, len(tc.jpeg))) {
				t.Errorf("event %+v %s", event, event.Fields)
			}
		})
	}
	if got := c.vision.Uploads.Get(outcomeStored); int(got) != len(cases) || c.vision.InProgress.Load() != 0 || c.vision.Bytes.Load() == 0 {
		t.Errorf("%d stored, %d bytes", got, c.vision.Bytes.Load())
	}
	if n := c.messages(t, "M"); n != len(cases) {
		t.Errorf("%d objects", n)
	}
}

// pad fills a JPEG with zeros.
func pad(jpeg []byte, size int) []byte {
	return append(bytes.Clone(jpeg), make([]byte, size-len(jpeg))...)
}

func TestSnapshotUpload(t *testing.T) {
	c := newTestServer(t)
	jpeg := picture(t, 320)
	url, photo := c.vision.Snapshot(robot, time.Now())
	if strings.Contains(strings.TrimPrefix(url, c.url), ":") {
		t.Errorf("the firmware does not accept a colon in a path: %s", url)
	}
	if id := c.screen(t, url, strings.NewReader(snapshotBody(jpeg))).must(t); id != photo {
		t.Errorf("stored as %s, announced as %s", id, photo)
	}
	if p, content := c.content(t, photo); p.Kind != KindSnapshot || p.Device != robot || !bytes.Equal(content, jpeg) {
		t.Errorf("%+v", p)
	}
	// security: D9
	if r := c.screen(t, url, strings.NewReader(snapshotBody(jpeg))); r.status != http.StatusConflict {
		t.Errorf("second use: %d %s", r.status, r.raw)
	}
	if err := c.vision.Delete(t.Context(), photo); err != nil {
		t.Fatal(err)
	}
	// security: D9
	if r := c.screen(t, url, strings.NewReader(snapshotBody(jpeg))); r.status != http.StatusConflict {
		t.Errorf("use after the photo was deleted: %d %s", r.status, r.raw)
	}
	if n := c.messages(t, "C"); n != 0 {
		t.Errorf("%d chunks remain", n)
	}
	url, photo = c.vision.Snapshot(robot, time.Now())
	refused := c.screen(t, url, strings.NewReader(snapshotBody([]byte("no picture"))))
	if refused.status != http.StatusUnsupportedMediaType {
		t.Errorf("%d %s", refused.status, refused.raw)
	}
	// A refused upload does not use up the URL.
	if id := c.screen(t, url, strings.NewReader(snapshotBody(jpeg))).must(t); id != photo {
		t.Errorf("stored as %s, announced as %s", id, photo)
	}
	for name, bad := range map[string]string{
		"expired":      c.url + PathSnapshot + c.mint.SnapshotToken(string(robot), newPhotoID(time.Now()), time.Now().Add(-time.Second)),
		"forged":       url + "x",
		"other device": strings.Replace(url, strings.Split(strings.TrimPrefix(url, c.url+PathSnapshot), ".")[0], "MTE6MjI6MzM6NDQ6NTU6NjYgYQ", 1),
		"no photo id":  c.url + PathSnapshot + c.mint.SnapshotToken(string(robot), "../x", time.Now().Add(time.Hour)),
		"camera token": c.url + PathSnapshot + c.mint.UploadToken(string(robot), time.Now().Add(time.Hour)),
	} {
		// security: D9
		if r := c.screen(t, bad, strings.NewReader(snapshotBody(jpeg))); r.status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", name, r.status, r.raw)
		}
	}
}

// TestSnapshotRace checks that a single-use URL accepts one upload, even if several arrive
// concurrently.
func TestSnapshotRace(t *testing.T) {
	c := newTestServer(t, func(o *Options) { o.PerDevice = MaxUploads })
	jpeg := picture(t, 64)
	url, photo := c.vision.Snapshot(robot, time.Now())
	const racers = 8
	// Each has sent its picture, but not the end of the body.
	var writers []*io.PipeWriter
	results := make(chan result, racers)
	body := snapshotBody(jpeg)
	for range racers {
		reader, writer := io.Pipe()
		writers = append(writers, writer)
		go func() { results <- c.screen(t, url, reader) }()
		if _, err := io.WriteString(writer, body[:len(body)-10]); err != nil {
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "all are in progress", func() bool { return c.vision.InProgress.Load() == racers })
	for _, w := range writers {
		go func() {
			_, _ = io.WriteString(w, body[len(body)-10:])
			_ = w.Close()
		}()
	}
	won := 0
	for range racers {
		switch r := <-results; r.status {
		case http.StatusOK:
			won++
		case http.StatusConflict:
		default:
			t.Errorf("%d %s", r.status, r.raw)
		}
	}
	if won != 1 || len(c.ports.Seen(devices.EventPhoto)) != 1 {
		t.Errorf("%d uploads were taken", won)
	}
	if _, content := c.content(t, photo); !bytes.Equal(content, jpeg) {
		t.Error("the winner's picture is broken")
	}
	if n := c.messages(t, "C"); n != 1 {
		t.Errorf("%d chunks are stored, 1 belongs to the winner", n)
	}
}

// TestNATSAway checks that a node without NATS refuses photos with an error text, and
// accepts them once NATS is connected; the same after its bucket was deleted.
func TestNATSAway(t *testing.T) {
	dir := t.TempDir()
	first := newNATS(t, dir, -1)
	url := first.ClientURL()
	port := first.Addr().(*net.TCPAddr).Port
	first.Shutdown()
	first.WaitForShutdown()
	js := dialNATS(t, url, nats.RetryOnFailedConnect(true))
	c := newTestServerOn(t, js)
	body := cameraBody("q", picture(t, 64))
	away := func() {
		t.Helper()
		if r := c.camera(t, robot, strings.NewReader(body)); r.status != http.StatusServiceUnavailable || c.vision.Uploads.Get(reasonUnavailable) == 0 {
			t.Errorf("%d %s", r.status, r.raw)
		}
		snapshot, _ := c.vision.Snapshot(robot, time.Now())
		if r := c.screen(t, snapshot, strings.NewReader(body)); r.status != http.StatusServiceUnavailable {
			t.Errorf("%d %s", r.status, r.raw)
		}
		if _, _, err := c.vision.List(t.Context(), "", "", 10); err != nil { // the index is in the database
			t.Error(err)
		}
		_, _, openErr := c.vision.Open(t.Context(), "reader", newPhotoID(time.Now()))
		for _, err := range []error{openErr, c.vision.Delete(t.Context(), newPhotoID(time.Now()))} {
			if e := devices.AsError(err); e.Code != devices.CodeUnavailable || e.Part != "nats" {
				t.Errorf("%v", err)
			}
		}
	}
	away()
	second := newNATS(t, dir, port)
	devicetest.Eventually(t, "NATS is connected", js.Conn().IsConnected)
	id := c.camera(t, robot, strings.NewReader(body)).must(t)
	c.content(t, id)
	if err := js.DeleteObjectStore(t.Context(), bucketName); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the bucket is created again", func() bool { return c.camera(t, robot, strings.NewReader(body)).status == http.StatusOK })
	second.Shutdown()
	second.WaitForShutdown()
	devicetest.Eventually(t, "NATS is disconnected", func() bool { return !js.Conn().IsConnected() })
	away()
}

// When the store is full, the oldest photos are removed.
func TestEviction(t *testing.T) {
	const limit = 3 << 20
	c := newTestServer(t, func(o *Options) { o.Limit = limit })
	jpeg := picture(t, 700)
	body := cameraBody("q", jpeg)
	var all []string
	for range 3 * limit / len(jpeg) {
		all = append(all, c.camera(t, robot, strings.NewReader(body)).must(t))
	}
	left := c.ids(t, t.Context(), "")
	slices.Reverse(left)
	if len(left) < 2 || len(left) > limit/len(jpeg) || !slices.Equal(left, all[len(all)-len(left):]) {
		t.Errorf("%d of %d remain, %d bytes each", len(left), len(all), len(jpeg))
	}
	for _, id := range left {
		if _, content := c.content(t, id); !bytes.Equal(content, jpeg) {
			t.Errorf("%s is broken", id)
		}
	}
}

// Concurrent uploads into a full store find room, although others use the room that was made.
func TestManyUploadsIntoAFullStore(t *testing.T) {
	const limit = 20 << 20
	clients, times := racetest.Size(24, 8), racetest.Size(20, 10)
	c := newTestServer(t, func(o *Options) { o.Limit, o.PerDevice, o.PerAddress = limit, clients, clients })
	jpeg := picture(t, 700)
	body := cameraBody("q", jpeg)
	for range limit/len(jpeg) + 1 {
		c.camera(t, robot, strings.NewReader(body)).must(t)
	}
	var tasks sync.WaitGroup
	var refused atomic.Int64
	for range clients {
		tasks.Go(func() {
			for range times {
				if c.camera(t, robot, strings.NewReader(body)).status != http.StatusOK {
					refused.Add(1)
				}
			}
		})
	}
	tasks.Wait()
	if n := refused.Load(); n != 0 {
		t.Errorf("%d of %d uploads were refused", n, clients*times)
	}
}

func TestPhotos(t *testing.T) {
	c := newTestServer(t)
	jpeg := picture(t, 64)
	var of = map[devices.ID][]string{}
	for i := range 9 {
		id := []devices.ID{robot, other, robot}[i%3]
		of[id] = append(of[id], c.camera(t, id, strings.NewReader(cameraBody(fmt.Sprint(i), jpeg))).must(t))
	}
	objects, err := c.js.ObjectStore(t.Context(), bucketName)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := objects.PutString(t.Context(), "foreign", "text"); err != nil {
		t.Fatal(err)
	}
	newest := slices.Clone(of[robot])
	slices.Sort(newest)
	slices.Reverse(newest)
	var paged []string
	before := ""
	for {
		page, more, err := c.vision.List(t.Context(), robot, before, 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range page {
			paged = append(paged, p.ID)
		}
		if !more {
			break
		}
		before = page[len(page)-1].ID
	}
	if !slices.Equal(paged, newest) {
		t.Errorf("%v, want %v", paged, newest)
	}
	if all := c.ids(t, t.Context(), ""); len(all) != 9 || !slices.IsSortedFunc(all, func(a, b string) int { return strings.Compare(b, a) }) {
		t.Errorf("%v", all)
	}
	if none := c.ids(t, t.Context(), "nobody"); len(none) != 0 {
		t.Errorf("%v", none)
	}
	if err := c.vision.Delete(t.Context(), newest[0]); err != nil {
		t.Fatal(err)
	}
	_, _, err = c.vision.Open(t.Context(), "reader", newest[0])
	for _, err := range []error{err, c.vision.Delete(t.Context(), newest[0]), c.vision.Delete(t.Context(), "foreign"), c.vision.Delete(t.Context(), newPhotoID(time.Now()))} {
		if e := devices.AsError(err); e.Code != devices.CodeNotFound {
			t.Errorf("%v", err)
		}
	}
	if left := c.ids(t, t.Context(), robot); !slices.Equal(left, newest[1:]) {
		t.Errorf("%v", left)
	}
	if n := c.messages(t, "C"); n != 8+1 {
		t.Errorf("%d chunks", n)
	}
}

func TestGrant(t *testing.T) {
	c := newTestServer(t)
	now := time.Now()
	url, token, expires := c.vision.Grant(robot, now)
	if url != c.url+PathExplain || c.mint.VerifyUpload(token, string(robot), expires.Add(-time.Second)) != nil || expires.Sub(now) > GrantLife ||
		expires.Sub(now) < GrantLife-time.Second {
		t.Errorf("%s %s %v", url, token, expires)
	}
	if err := c.mint.VerifyUpload(token, string(robot), expires); err == nil {
		t.Error("valid when it has expired")
	}
	none := New(Options{Mint: c.mint, JetStream: c.js})
	if url, token, expires := none.Grant(robot, now); url != "" || token != "" || !expires.IsZero() {
		t.Errorf("%s %s %v", url, token, expires)
	}
	// Without a core it refuses uploads.
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, PathExplain, nil)
	r.Header.Set("Device-Id", string(robot))
	r.Header.Set("Authorization", "Bearer "+token)
	none.explain(w, r)
	if w.Code != http.StatusServiceUnavailable {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestPhotoIDs(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	last := ""
	for _, after := range []time.Duration{0, time.Millisecond, time.Hour, 40 * 365 * 24 * time.Hour, 200 * 365 * 24 * time.Hour} {
		id := newPhotoID(start.Add(after))
		if !isPhotoID(id) || id <= last {
			t.Errorf("%s after %s", id, last)
		}
		last = id
	}
	if again := newPhotoID(start); again == newPhotoID(start) {
		t.Error("two ids are equal")
	}
	for _, bad := range []string{"", "a", strings.Repeat("A", idLength), strings.Repeat("a", idLength+1), "aaaaaaaaaa-aaaaaaaaa"} {
		if isPhotoID(bad) {
			t.Errorf("%q counts as a photo id", bad)
		}
	}
}

// FuzzUpload checks that for any input, the result is either a picture in the bucket, or a
// refusal and nothing in the bucket.
func FuzzUpload(f *testing.F) {
	jpeg := picture(f, 16)
	f.Add([]byte(cameraBody("q", jpeg)))
	f.Add([]byte(cameraBody("q", jpeg) + "\r\n"))
	f.Add([]byte(cameraBody("", jpeg[:len(jpeg)-1])))
	f.Add([]byte("--" + cameraBoundary + "--"))
	f.Add([]byte("--" + cameraBoundary + "\r\n\r\n"))
	f.Add([]byte(strings.ReplaceAll(snapshotBody(jpeg), snapshotBoundary, cameraBoundary)))
	c := newTestServer(f)
	id := c.camera(f, robot, strings.NewReader(cameraBody("", jpeg))).must(f)
	if err := c.vision.Delete(f.Context(), id); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r := httptest.NewRequest(http.MethodPost, PathExplain, bytes.NewReader(body))
		r.Header.Set("Content-Type", "multipart/form-data; boundary="+cameraBoundary)
		form, err := r.MultipartReader()
		if err != nil {
			t.Fatal(err)
		}
		d := newDraft(c.vision.bucket)
		defer d.free()
		question, err := d.readForm(t.Context(), form)
		defer d.abort(t.Context())
		refused := (*refusal)(nil)
		switch {
		case errors.As(err, &refused):
			if refused.status < 400 || refused.message == "" || refused.cause != nil {
				t.Fatalf("%+v", refused)
			}
		case err != nil:
			t.Fatal(err)
		case d.size == 0 || len(question) > 3*MaxQuestion || checkHead(body[bytes.Index(body, []byte{0xFF, 0xD8}):]) != nil:
			t.Fatalf("%d bytes were taken as a picture", d.size)
		}
	})
}

var _ session.Vision = (*Server)(nil)

// While MaxFetching photos are read from the store, a further reader waits, no longer than its request.
func TestPhotosAreFetchedInTurn(t *testing.T) {
	c := newTestServer(t)
	id := c.camera(t, robot, strings.NewReader(cameraBody("q", picture(t, 64)))).must(t)
	for range MaxFetching {
		c.vision.fetching <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	// security: N43
	if _, _, err := c.vision.Open(ctx, "reader", id); err == nil {
		t.Error("a photo was read beside as many as may be read at once")
	}
	<-c.vision.fetching
	if _, jpeg := c.content(t, id); len(jpeg) == 0 {
		t.Error("an empty photo")
	}
	if n := len(c.vision.fetching); n != MaxFetching-1 {
		t.Errorf("%d photos are being read, want %d", n, MaxFetching-1)
	}
}

// A reader that takes all that it may leaves photos to others, and nothing is left of it afterwards.
func TestReadersHaveShares(t *testing.T) {
	c := newTestServer(t)
	id := c.camera(t, robot, strings.NewReader(cameraBody("q", picture(t, 64)))).must(t)
	var open []io.ReadCloser
	for range MaxPerReader {
		_, photo, err := c.vision.Open(t.Context(), "slow", id)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, photo)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	// security: N48
	if _, _, err := c.vision.Open(ctx, "slow", id); !errors.Is(err, errTooManyRead) {
		t.Errorf("one more: %v", err)
	}
	// security: N48
	if _, jpeg := c.content(t, id); len(jpeg) == 0 {
		t.Error("an empty photo")
	}
	for _, photo := range open {
		_ = photo.Close()
		_ = photo.Close() // a second time changes nothing
	}
	if len(c.vision.readers) != 0 || len(c.vision.reading) != 0 {
		t.Errorf("%d readers and %d places are left", len(c.vision.readers), len(c.vision.reading))
	}
}
