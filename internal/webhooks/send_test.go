package webhooks

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
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
	allow, err := ParseAllow([]string{"127.0.0.1", "receiver.invalid"})
	if err != nil {
		t.Fatal(err)
	}
	s := newSender(allow, "test")
	defer s.close()
	for url, want := range map[string]string{
		closes.URL: "the receiver closed the connection without an answer",
		strings.Replace(closes.URL, "http:", "https:", 1): "the receiver does not speak HTTPS on this port; set a URL with http:// or another port",
		private.URL:                "its certificate is not accepted: x509: certificate signed by unknown authority",
		"http://receiver.invalid/": `the name "receiver.invalid" has no address`,
	} {
		if _, err := s.send(t.Context(), url, []byte("k"), "msg_1", message{}); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", url, err, want)
		}
	}
}
