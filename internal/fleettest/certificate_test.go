package fleettest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// writePair writes a self-signed certificate with this serial number.
func writePair(t *testing.T, cert, key string, serial int64, expires time.Time) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: expires, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A renewed certificate reaches the HTTPS port and the MQTT port alike, at once
// with SIGHUP; one that is broken reaches neither, and the node goes on.
func TestCertificateOnEveryPort(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
	soon := time.Now().Add(time.Hour).Truncate(time.Second)
	writePair(t, cert, key, 1, soon)
	node := programs.Start(t, "--device-tls-cert", cert, "--device-tls-key", key, "--mqtt-tls-listen", freePort(t))
	served := func(address string) int64 {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return -1
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	everywhere := func(serial int64) bool {
		return served(strings.TrimPrefix(node.Info.Device, "https://")) == serial && served(node.Setting("--mqtt-tls-listen")) == serial
	}
	hangUp := func() {
		if err := node.process.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	if !everywhere(1) || node.Metric(t, "fleetd_certificate_expiry_timestamp_seconds") != float64(soon.Unix()) {
		t.Errorf("the first certificate is not served, or expires at %v", node.Metric(t, "fleetd_certificate_expiry_timestamp_seconds"))
	}
	for address, protocol := range map[string]string{strings.TrimPrefix(node.Info.Device, "https://"): "http/1.1", node.Setting("--mqtt-tls-listen"): "mqtt"} {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}})
		if err != nil || conn.ConnectionState().NegotiatedProtocol != protocol {
			t.Errorf("ALPN %s: %v", protocol, err)
			continue
		}
		_ = conn.Close()
	}
	later := soon.Add(24 * time.Hour)
	writePair(t, cert, key, 2, later)
	hangUp()
	node.Await(t, "the renewed certificate is served", 5*time.Second, func() bool { return everywhere(2) })
	if got := node.Metric(t, "fleetd_certificate_expiry_timestamp_seconds"); got != float64(later.Unix()) {
		t.Errorf("expires at %v, want %v", got, later.Unix())
	}
	if err := os.WriteFile(key, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	hangUp()
	node.Await(t, "the broken pair is noticed", 5*time.Second, func() bool { return node.Metric(t, "fleetd_certificate_reloads_total", `result="failed"`) == 1 })
	if !everywhere(2) {
		t.Error("a broken pair ends the old one")
	}
}
