package fleettest

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// nohup is the program as nohup starts it.
func (p Programs) nohup(t *testing.T) Programs {
	t.Helper()
	script := filepath.Join(t.TempDir(), "nohup")
	if err := os.WriteFile(script, []byte(fmt.Sprintf("#!/bin/sh\ntrap '' HUP\nexec %s \"$@\"\n", p.Fleetd)), 0o700); err != nil {
		t.Fatal(err)
	}
	p.Fleetd = script
	return p
}

// SIGHUP ends no node: not one without files to read again, nor one that was
// started to ignore it, which goes on ignoring it.
func TestHangupEndsNoNode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		programs Programs
		reloads  bool
	}{{"plain", programs, true}, {"nohup", programs.nohup(t), false}} {
		t.Run(tc.name, func(t *testing.T) {
			node := tc.programs.Start(t)
			node.signal(t, syscall.SIGHUP)
			const output = "SIGHUP: reloading"
			if tc.reloads {
				node.Await(t, "the node logs what it does", 5*time.Second, func() bool { return strings.Contains(node.Log.String(), output) })
			}
			for range 5 {
				time.Sleep(100 * time.Millisecond) // there is nothing to wait for: it must not end
				if err := node.Live(t.Context()); err != nil {
					t.Fatalf("after SIGHUP: %v", err)
				}
			}
			if !tc.reloads && strings.Contains(node.Log.String(), output) {
				t.Error("under nohup SIGHUP is not ignored")
			}
		})
	}
}

// The API speaks TLS with a certificate that is read again, and commands on this
// machine find and trust it.
func TestTLSOnTheAPI(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
	writePair(t, cert, key, 1, time.Now().Add(time.Hour))
	node := programs.Start(t, "--api-tls-cert", cert, "--api-tls-key", key)
	address := strings.TrimPrefix(node.Info.API, "https://")
	if address == node.Info.API {
		t.Fatalf("the API is at %s", node.Info.API)
	}
	served := func() int64 {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}})
		if err != nil {
			return -1
		}
		defer func() { _ = conn.Close() }()
		if p := conn.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
			t.Errorf("it speaks %q, whose streams have no deadlines", p)
		}
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	if n := served(); n != 1 {
		t.Errorf("certificate %d is served", n)
	}
	if out, output, status := node.Command(t, "nodes"); status != 0 || !strings.Contains(out, "n-") {
		t.Errorf("a command on this machine: %d %s %s", status, out, output)
	}
	writePair(t, cert, key, 2, time.Now().Add(2*time.Hour))
	node.signal(t, syscall.SIGHUP)
	node.Await(t, "the new certificate is served", 5*time.Second, func() bool { return served() == 2 })
	if _, output, status := node.Command(t, "nodes"); status != 0 {
		t.Errorf("a command after the renewal: %d %s", status, output)
	}
	// Nobody else's certificate will do.
	client := http.Client{Transport: &http.Transport{}}
	if _, err := client.Get(node.Info.API + "/livez"); err == nil {
		t.Error("a client without this authority trusts the API")
	}
	output := programs.Refused(t, "--api-tls-cert", cert, "--api-tls-key", filepath.Join(dir, "none.pem"))
	if !strings.Contains(output, "--api-tls-cert, --api-tls-key") {
		t.Errorf("without its key: %s", output)
	}
}
