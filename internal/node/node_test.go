package node

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"fleetd/internal/config"
	"fleetd/internal/datadir"
)

var quiet = slog.New(slog.DiscardHandler)

func open(t *testing.T, path string) *datadir.Dir {
	t.Helper()
	d, err := datadir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

func load(t *testing.T, flags map[string]string) *config.Config {
	t.Helper()
	cfg, err := config.Load(flags, nil)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// taken returns an address on which another listener listens.
func taken(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

func TestPortRule(t *testing.T) {
	d := open(t, t.TempDir())
	address := taken(t)
	listen := func(flags map[string]string, fresh bool, address string) (net.Listener, *listeners, error) {
		l, err := newListeners(load(t, flags), d, quiet, fresh)
		if err != nil {
			t.Fatal(err)
		}
		listener, err := l.open("device-listen", address)
		return listener, l, err
	}
	if _, _, err := listen(map[string]string{"device-listen": address}, true, address); err == nil || !strings.Contains(err.Error(), "--device-listen") {
		t.Errorf("a given port that is taken: %v", err)
	}
	if _, _, err := listen(nil, false, address); err == nil {
		t.Error("a default port moved although devices know it")
	}
	moved, l, err := listen(nil, true, address)
	if err != nil || !l.moved["device-listen"] || moved.Addr().String() == address {
		t.Fatalf("a default port that is taken does not move: %v", err)
	}
	if err := l.save(); err != nil {
		t.Fatal(err)
	}
	// The chosen port counts as given from now on.
	if _, _, err := listen(nil, true, address); err == nil || !strings.Contains(err.Error(), strconv.Itoa(port(moved))) {
		t.Errorf("the stored port, taken: %v", err)
	}
	_ = moved.Close()
	again, _, err := listen(nil, true, address)
	if err != nil || port(again) != port(moved) {
		t.Errorf("the stored port is not used: %v", err)
	}
	_ = again.Close()
}

// pair writes a self-signed certificate with this serial number.
func pair(t *testing.T, dir string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{"c.pem": {Type: "CERTIFICATE", Bytes: der}, "k.pem": {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(1_800_000_000+serial, 0)
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCertificateReload(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
	var complaints bytes.Buffer
	n := &node{log: slog.New(slog.NewTextHandler(&complaints, &slog.HandlerOptions{Level: slog.LevelError}))}
	if _, err := n.newCertificate("--device-tls-cert", cert, key); err == nil {
		t.Error("files that do not exist are accepted")
	}
	pair(t, dir, 2)
	c, err := n.newCertificate("--device-tls-cert", cert, key)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", c.config())
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).Handshake() // the client reports the error
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-served
	})
	serial := func() int64 { // by a real handshake
		conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	check := func(since time.Duration) { // as if the files had been checked that long ago
		c.checked = time.Now().Add(-since)
		c.check(false)
	}
	due := func() { check(10 * time.Second) }
	pair(t, dir, 3)
	check(9 * time.Second)
	if got := serial(); got != 2 {
		t.Errorf("certificate %d is served before the files are looked at", got)
	}
	due()
	if got := serial(); got != 3 {
		t.Errorf("certificate %d is served after the change", got)
	}
	pair(t, dir, 1) // its files have an older time
	due()
	if got := serial(); got != 1 {
		t.Errorf("certificate %d is served after a change to older files", got)
	}
	if err := os.WriteFile(cert, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		due()
		if got := serial(); got != 1 {
			t.Errorf("certificate %d is served after a broken change", got)
		}
	}
	if n := strings.Count(complaints.String(), "cannot load the changed certificate files"); n != 1 || c.failures.Load() != 1 || c.reloads.Load() != 2 {
		t.Errorf("%d complaints of one change, %d failures, %d reloads", n, c.failures.Load(), c.reloads.Load())
	}
	pair(t, dir, 4)
	c.check(true)
	if got := serial(); got != 4 {
		t.Errorf("certificate %d is served after a reload by hand", got)
	}
	if left := time.Until(c.expires()); left < 50*time.Minute || left > time.Hour {
		t.Errorf("expires in %v", left)
	}
}

// A listener with TLS speaks HTTP/1.1 alone: the limits of connections and of what they have not read are made for it.
func TestHTTP1Alone(t *testing.T) {
	dir := t.TempDir()
	pair(t, dir, 2)
	n := &node{log: quiet, serveErr: make(chan error, 1)}
	c, err := n.newCertificate("--api-tls-cert", filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n.serve("api-listen", &http.Server{Handler: http.NotFoundHandler(), TLSConfig: c.config(), ReadHeaderTimeout: time.Minute}, l)
	t.Cleanup(n.stop)
	for _, protocol := range []string{"h2", "http/1.1"} {
		conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}})
		if (err == nil) != (protocol == "http/1.1") {
			t.Errorf("%s: %v", protocol, err)
		}
		if err == nil {
			_ = conn.Close()
		}
	}
}
