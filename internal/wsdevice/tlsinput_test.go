package wsdevice

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"net/http/httptest"
	"testing"
	"unsafe"
)

// A TLS connection that has received a large message frees the buffer and remains usable.
func TestReleaseInput(t *testing.T) {
	t.Parallel()
	if tlsRaw == 0 || tlsInput == 0 {
		t.Fatal("the fields of tls.Conn have changed; adapt tlsinput.go")
	}
	pair := httptest.NewUnstartedServer(nil)
	pair.StartTLS()
	defer pair.Close()
	near, far := net.Pipe()
	server := tls.Server(near, pair.TLS)
	client := tls.Client(far, &tls.Config{InsecureSkipVerify: true})
	raw := (*bytes.Buffer)(unsafe.Add(unsafe.Pointer(server), tlsRaw))
	for round := range 20 {
		text := bytes.Repeat([]byte{byte(round)}, []int{12_000, 10, 4096, 60_000}[round%4])
		written := make(chan error, 1)
		go func() {
			_, err := client.Write(text)
			written <- err
		}()
		got := make([]byte, len(text))
		for n := 0; n < len(got); {
			some, err := server.Read(got[n:min(n+256, len(got))]) // as the WebSocket's reader does
			if err != nil {
				t.Fatal(err)
			}
			n += some
			releaseInput(server) // bytes of an incomplete record are kept
		}
		if err := <-written; err != nil || !bytes.Equal(got, text) {
			t.Fatalf("round %d: %v, or the text is another", round, err)
		}
		if raw.Cap() > keepInput {
			t.Errorf("round %d: the buffer still has %d bytes", round, raw.Cap())
		}
	}
	go func() { _ = client.CloseWrite() }()
	if _, err := server.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the end is %v", err)
	}
	releaseInput(near) // not TLS: nothing to do
}
