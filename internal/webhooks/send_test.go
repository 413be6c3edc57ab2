package webhooks

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"fleetd/internal/egress"
)

// An error names what is wrong with the receiver.
func TestFailuresInWords(t *testing.T) {
	closes := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			conn.Close()
		}
	}))
	defer closes.Close()
	private := httptest.NewUnstartedServer(http.NotFoundHandler())
	private.Config.ErrorLog = log.New(io.Discard, "", 0)
	private.StartTLS()
	defer private.Close()
	foreign := func(answer string) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, answer)
				_ = c.Close()
			}
		}()
		return "http://" + l.Addr().String()
	}
	allow, err := egress.Parse("--webhook-allow", []string{"127.0.0.1", "receiver.invalid"})
	if err != nil {
		t.Fatal(err)
	}
	s := newSender(allow, "test")
	defer s.close()
	for url, want := range map[string]string{
		closes.URL: "the receiver closed the connection without an answer",
		strings.Replace(closes.URL, "http:", "https:", 1): "the receiver does not speak HTTPS on this port; set a URL with http:// or another port",
		private.URL: "its certificate is not accepted: x509: certificate signed by unknown authority",
		foreign("SECRET of another protocol\r\n"):              "the answer is not HTTP; check the scheme and the port of the URL",
		foreign("HTTP/1.1 200 OK\r\nSECRET of a line\r\n\r\n"): "the answer is not HTTP; check the scheme and the port of the URL",
		"http://receiver.invalid/":                             `the name "receiver.invalid" has no address`,
	} {
		// security: N50
		if _, err := s.send(t.Context(), url, []byte("k"), "msg_1", message{}); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", url, err, want)
		}
	}
}
