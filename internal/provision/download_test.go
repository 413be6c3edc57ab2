package provision

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/connlimit"
)

// The buffers of the system take a whole image at once. A download has not ended before the device has taken it from them: a device without
// power would count as flashed, and one that is slow would see the node close first.
func TestSlowDevice(t *testing.T) {
	t.Parallel()
	const size = 256 << 10
	ended := make(chan error, 1)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ended <- serveDownload(w, r, size, func(write func([]byte) error) error { return write(make([]byte, size)) }, func() {})
	}))
	server.Config.ConnContext = connlimit.WithConn
	server.Listener = connlimit.NewLimiter(0, 0, nil).Limit(server.Listener)
	server.Start()
	defer server.Close()
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).SetReadBuffer(16 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReaderSize(c, 1<<10), nil)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		t.Fatalf("it ended while the device had read nothing: %v", err)
	case <-time.After(closeTime + 2*time.Second):
	}
	if n, err := io.Copy(io.Discard, answer.Body); n != size || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	_ = c.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestEndOfDownload(t *testing.T) {
	for name, c := range map[string]struct {
		left []int // each time somebody looks; the last one stays
		end  bool
		took time.Duration
	}{
		"it has read everything":               {[]int{0}, true, closeTime},
		"it reads on":                          {[]int{300, 200, 100, 0}, true, 4 * closeTime},
		"it stands still":                      {[]int{300, 200}, false, 2*closeTime + writeTime - closeTime},
		"it stands still, and goes on in time": {[]int{300, 300, 300, 300, 300, 300, 0}, true, 7 * closeTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun, looks := time.Now(), 0
				err := awaitRead(context.Background(), func() int {
					looks++
					return c.left[min(looks, len(c.left))-1]
				}, func() {})
				if took := time.Since(begun); (err == nil) != c.end || took != c.took {
					t.Errorf("%v after %v, want %v", err, took, c.took)
				}
			})
		})
	}
}
