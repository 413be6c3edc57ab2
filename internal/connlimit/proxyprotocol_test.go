package connlimit

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
)

func header(t *testing.T, version byte, source string) []byte {
	t.Helper()
	h := proxyproto.HeaderProxyFromAddrs(version, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(source)), net.TCPAddrFromAddrPort(netip.MustParseAddrPort("192.0.2.1:8000")))
	b, err := h.Format()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestProxyListener(t *testing.T) {
	listen := func(trusted string) *ProxyListener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p := NewProxyListener(l, []netip.Prefix{netip.MustParsePrefix(trusted)}, slog.New(slog.DiscardHandler))
		t.Cleanup(func() { _ = p.Close() })
		return p
	}
	proxies, direct := listen("127.0.0.0/8"), listen("192.0.2.0/24")
	dial := func(p *ProxyListener, first ...[]byte) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", p.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		for _, b := range first {
			if _, err := c.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		return c
	}
	dial(proxies) // a silent connection must not delay the others
	for _, c := range []struct {
		name   string
		at     *ProxyListener
		first  []byte
		remote string // empty: the connection's own
		text   string
	}{
		{"version 1", proxies, header(t, 1, "203.0.113.9:1234"), "203.0.113.9:1234", "hello"},
		{"version 2", proxies, header(t, 2, "203.0.113.9:1234"), "203.0.113.9:1234", "hello"},
		{"version 2, IPv6", proxies, append(bytes.Clone([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x21\x00\x24")), append(append(net.ParseIP("2001:db8::7").To16(), net.ParseIP("2001:db8::1").To16()...), 4, 210, 31, 64)...), "[2001:db8::7]:1234", "hello"},
		{"unknown", proxies, []byte("PROXY UNKNOWN\r\n"), "", "hello"},
		{"local", proxies, []byte("\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00"), "", "hello"},
		{"not trusted", direct, header(t, 1, "203.0.113.9:1234"), "", string(header(t, 1, "203.0.113.9:1234")) + "hello"},
	} {
		client := dial(c.at, c.first, []byte("hello"))
		server, err := c.at.Accept()
		if err != nil {
			t.Fatal(err)
		}
		want := c.remote
		if want == "" {
			want = client.LocalAddr().String()
		}
		text := make([]byte, len(c.text))
		_ = server.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, err = io.ReadFull(server, text)
		// security: D19
		if err != nil || server.RemoteAddr().String() != want || string(text) != c.text {
			t.Errorf("%s: %v sends %q, %v; want %s", c.name, server.RemoteAddr(), text, err, want)
		}
		_ = server.Close()
	}
	for name, first := range map[string]string{"no header": "GET / HTTP/1.1\r\n\r\n", "broken": "PROXY TCP4 203.0.113.9\r\n", "MQTT": "\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x00\x00\x00\x00\x00\x00\x00"} {
		client := dial(proxies, []byte(first))
		_ = client.SetReadDeadline(time.Now().Add(HeaderTimeout / 2))
		// security: D19
		if n, err := client.Read(make([]byte, 10)); n > 0 || err == nil || isTimeout(err) {
			t.Errorf("%s: a trusted peer reads %d bytes, %v", name, n, err)
		}
	}
	if n := proxies.Refused.Load(); n != 3 {
		t.Errorf("%d are counted", n)
	}
}

func isTimeout(err error) bool {
	network, ok := err.(net.Error)
	return ok && network.Timeout()
}
