//go:build linux

package connlimit

import (
	"net"
	"net/http"
	"testing"
	"time"
)

// A client that does not read is closed even if the whole response fits into the buffers
// of the operating system, so that no write waits.
func TestUnreadAnswersEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	limited := NewLimiter(0, 0, nil).LimitCallers(l)
	limited.unread = 500 * time.Millisecond
	ended, written := make(chan struct{}), make(chan error, 1)
	serveOn(t, limited, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := w.Write(make([]byte, 200<<10))
		written <- err
		select {
		case <-r.Context().Done(): // the stream goes on until its client is gone
			close(ended)
		case <-time.After(20 * time.Second):
		}
	}))
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() // its peer has ended it
	if err := c.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil {
		t.Fatalf("the response does not fit into the system's buffers, so the test proves nothing: %v", err)
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		// security: N30
		t.Error("a connection is kept open for a client that does not read")
	}
}
