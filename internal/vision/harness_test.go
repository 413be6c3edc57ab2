package vision

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	"image/jpeg"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/natstest"
	"fleetd/internal/store"
	"fleetd/internal/store/photos"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	robot      = devices.ID("aa:bb:cc:dd:ee:ff")
	other      = devices.ID("11:22:33:44:55:66")
	bucketName = "TEST_PHOTOS"
)

// newNATS runs a server in this process; port 0 has none, -1 a free one.
func newNATS(t testing.TB, dir string, port int) *server.Server {
	t.Helper()
	return natstest.Start(t, server.Options{DontListen: port == 0, Port: port, JetStream: true, StoreDir: dir})
}

func dialNATS(t testing.TB, url string, options ...nats.Option) jetstream.JetStream {
	t.Helper()
	options = append(options, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectBufSize(-1))
	conn, err := nats.Connect(url, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// newIndex returns the index in a new database.
func newIndex(t testing.TB) *photos.Index {
	t.Helper()
	s, err := store.Open(context.Background(), "sqlite", t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	return photos.New(s)
}

// testServer is a core with a photo receiver.
type testServer struct {
	ports   *devicetest.Ports
	service *fleet.Service
	vision  *Server
	mint    *credential.Mint
	js      jetstream.JetStream
	url     string
}

func newTestServer(t testing.TB, change ...func(*Options)) *testServer {
	t.Helper()
	js := dialNATS(t, "", nats.InProcessServer(newNATS(t, t.TempDir(), 0)))
	return newTestServerOn(t, js, change...)
}

func newTestServerOn(t testing.TB, js jetstream.JetStream, change ...func(*Options)) *testServer {
	t.Helper()
	mint, err := credential.New([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	c := &testServer{ports: devicetest.New(), mint: mint, js: js}
	mux := http.NewServeMux()
	web := httptest.NewUnstartedServer(mux)
	web.Config.ReadTimeout = 15 * time.Second // as in the node
	web.Start()
	t.Cleanup(web.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	c.url = web.URL
	opt := Options{Index: newIndex(t), Mint: mint, JetStream: js, Bucket: bucketName, Retention: time.Hour, Limit: 64 << 20, PublicURL: web.URL, Log: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&opt)
	}
	c.vision = New(opt)
	c.vision.OpenStore(devices.Alone)
	c.vision.Register(mux)
	c.service = c.ports.ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Vision, p.Audit = c.vision, nil })
	for _, id := range []devices.ID{robot, other} {
		if _, err := c.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "client-1"}); err != nil {
			t.Fatal(err)
		}
	}
	c.vision.Attach(c.service)
	return c
}

// picture returns a JPEG of noise, which does not compress: about side*side bytes.
func picture(t testing.TB, side int) []byte {
	t.Helper()
	img := image.NewGray(image.Rect(0, 0, side, side))
	random := rand.New(rand.NewPCG(1, uint64(side)))
	for i := range img.Pix {
		img.Pix[i] = byte(random.Uint32())
	}
	var b bytes.Buffer
	if err := jpeg.Encode(&b, img, &jpeg.Options{Quality: 80}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Bodies as the firmware writes them, byte for byte (esp32_camera.cc:290-331, lvgl_display.cc
// and mcp_server.cc:204-250 of v2.4.2).

const (
	cameraBoundary   = "----ESP32_CAMERA_BOUNDARY"
	snapshotBoundary = "----ESP32_SCREEN_SNAPSHOT_BOUNDARY"
)

func cameraBody(question string, jpeg []byte) string {
	return "--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\n" + question + "\r\n" +
		"--" + cameraBoundary + "\r\nContent-Disposition: form-data; name=\"file\"; filename=\"camera.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n" +
		string(jpeg) + "\r\n--" + cameraBoundary + "--\r\n"
}

func snapshotBody(jpeg []byte) string {
	return "--" + snapshotBoundary + "\r\nContent-Disposition: form-data; name=\"file\"; filename=\"screenshot.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n" +
		string(jpeg) + "\r\n--" + snapshotBoundary + "--\r\n"
}

// cameraHead returns the request header of the firmware's HTTP client: HTTP/1.1, chunked.
func (c *testServer) cameraHead(id devices.ID) string {
	_, token, _ := c.vision.Grant(id, time.Now())
	return "POST " + PathExplain + " HTTP/1.1\r\nHost: " + strings.TrimPrefix(c.url, "http://") + "\r\nDevice-Id: " + string(id) +
		"\r\nClient-Id: client-1\r\nAuthorization: Bearer " + token + "\r\nContent-Type: multipart/form-data; boundary=" + cameraBoundary +
		"\r\nTransfer-Encoding: chunked\r\n\r\n"
}

func chunked(body string, size int) string {
	var b strings.Builder
	for len(body) > 0 {
		n := min(size, len(body))
		fmt.Fprintf(&b, "%x\r\n%s\r\n", n, body[:n])
		body = body[n:]
	}
	return b.String() + "0\r\n\r\n"
}

// wire sends bytes unchanged and reads one response.
func (c *testServer) wire(t testing.TB, request string) result {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, answer)
}

// result is a response as the device reads it.
type result struct {
	status  int
	raw     string
	Success bool
	Photo   string
	Message string
}

func read(t testing.TB, answer *http.Response) result {
	t.Helper()
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	r := result{status: answer.StatusCode, raw: string(body)}
	if err := json.Unmarshal(body, &r); err != nil || answer.Header.Get("Content-Type") != "application/json" || len(body) > 6<<10 {
		t.Errorf("answer %d %q, %d bytes: %v", answer.StatusCode, body, len(body), err)
	}
	if r.Success != (r.status == http.StatusOK) || r.Success == (r.Message != "" && r.Message != lateMessage) || r.Success != isPhotoID(r.Photo) {
		t.Errorf("answer %d %s", r.status, r.raw)
	}
	return r
}

// camera uploads as any HTTP client does.
func (c *testServer) camera(t testing.TB, id devices.ID, body io.Reader, headers ...string) result {
	t.Helper()
	url, token, _ := c.vision.Grant(id, time.Now())
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Device-Id", string(id))
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "multipart/form-data; boundary="+cameraBoundary)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, answer)
}

func (c *testServer) screen(t testing.TB, url string, body io.Reader) result {
	t.Helper()
	answer, err := http.Post(url, "multipart/form-data; boundary="+snapshotBoundary, body)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, answer)
}

// must returns the photo id of a successful upload.
func (r result) must(t testing.TB) string {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("upload: %d %s", r.status, r.raw)
	}
	return r.Photo
}

// messages returns the number of messages in the bucket under one kind of subject.
func (c *testServer) messages(t testing.TB, kind string) int {
	t.Helper()
	stream, err := c.js.Stream(t.Context(), "OBJ_"+bucketName)
	if err != nil {
		t.Fatal(err)
	}
	info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("$O."+bucketName+"."+kind+".>"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, count := range info.State.Subjects {
		n += int(count)
	}
	return n
}

// content returns a stored photo.
func (c *testServer) content(t testing.TB, id string) (devices.Photo, []byte) {
	t.Helper()
	photo, reader, err := c.vision.Open(t.Context(), "reader", id)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	b, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	return photo, b
}

func (c *testServer) ids(t testing.TB, ctx context.Context, device devices.ID) []string {
	t.Helper()
	photos, _, err := c.vision.List(ctx, device, "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, p := range photos {
		ids = append(ids, p.ID)
	}
	return ids
}
