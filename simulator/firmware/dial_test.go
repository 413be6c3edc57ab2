package firmware

import (
	"encoding/pem"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTLSTrust(t *testing.T) {
	srv := httptest.NewTLSServer(nil)
	defer srv.Close()
	// Refused handshakes are the point of this test, not something to print.
	srv.Config.ErrorLog = nil
	ca := filepath.Join(t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	if err := os.WriteFile(ca, block, 0o600); err != nil {
		t.Fatal(err)
	}
	u, err := parseWSURL(strings.Replace(srv.URL, "https", "wss", 1) + "/")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name     string
		ca       string
		insecure bool
		trusts   bool
	}{
		{"system roots", "", false, false},
		{"own roots", ca, false, true},
		{"insecure", "", true, true},
	} {
		d, err := newDialer(tt.ca, tt.insecure)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := d.dial(t.Context(), 0, u)
		if (err == nil) != tt.trusts {
			t.Errorf("%s: %v", tt.name, err)
		}
		if err == nil {
			_ = conn.Close()
		}
	}
	if _, err := newDialer(filepath.Join(t.TempDir(), "none"), false); err == nil || !strings.Contains(err.Error(), "--ca") {
		t.Errorf("missing CA file: %v", err)
	}
}

func TestLoopbackSources(t *testing.T) {
	loop, far := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1")
	for _, tt := range []struct {
		target netip.Addr
		index  int
		want   string
	}{
		{loop, 0, "invalid IP"}, {loop, devicesPerSource - 1, "invalid IP"}, {loop, devicesPerSource, "127.0.0.2"},
		{loop, 2 * devicesPerSource, "127.0.0.3"}, {far, 2 * devicesPerSource, "invalid IP"},
	} {
		if got := loopbackSource(tt.target, tt.index).String(); got != tt.want {
			t.Errorf("device %d to %s dials from %s, want %s", tt.index, tt.target, got, tt.want)
		}
	}
	// The second source address must really work.
	s := newFakeServer(t)
	d, err := newDialer("", false)
	if err != nil {
		t.Fatal(err)
	}
	u, err := parseHTTPURL(s.base)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := d.dial(t.Context(), devicesPerSource, u)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if got := conn.LocalAddr().String(); !strings.HasPrefix(got, "127.0.0.2:") {
		t.Errorf("local address %s", got)
	}
}
