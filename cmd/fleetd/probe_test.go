package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
)

// serveRaw answers each connection with bytes as they are, and closes it then or leaves that to the client.
func serveRaw(t *testing.T, answer func(conn net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					answer(conn)
				}
			}()
		}
	}()
	return "http://" + l.Addr().String() + "/xiaozhi/f/token"
}

// TestCheckDownload: everything that a proxy may do to a download is named.
func TestCheckDownload(t *testing.T) {
	body := strings.Repeat("probe", 100)
	sum := sha256.Sum256([]byte(body))
	ok := "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 500\r\nConnection: close\r\n\r\n"
	wait := func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) } // until the client closes
	for _, c := range []struct {
		name, answer string
		closes       bool
		severity     string
		want         string
	}{
		{"as it should be", ok + body, false, "", ""},
		{"a redirect", "HTTP/1.1 301 Moved\r\nLocation: https://fleet.example.com/\r\n\r\n", true, severityError, "is redirected to https://fleet.example.com/"},
		{"another status", "HTTP/1.1 404 Not Found\r\n\r\n", true, severityError, "is answered with 404 Not Found"},
		{"chunks", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1f4\r\n" + body + "\r\n0\r\n\r\n", true, severityError, "Transfer-Encoding: chunked"},
		{"no length", "HTTP/1.1 200 OK\r\n\r\n" + body, true, severityError, "has no Content-Length"},
		{"compressed", "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", true, severityError, "is compressed (gzip)"},
		{"names in lower case", strings.ReplaceAll(ok, "Content-Length", "content-length") + body, false, severityWarning, "has the header content-length"},
		{"long headers", strings.Replace(ok, "\r\n\r\n", "\r\nX: "+strings.Repeat("x", 1200)+"\r\n\r\n", 1) + body, false, severityWarning, "headers of a download"},
		{"endless headers", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", 10_000), true, severityError, "headers do not end"},
		{"cut off", ok + body[:200], true, severityError, "ends after 200 of 500 bytes"},
		{"other bytes", ok + strings.ToUpper(body), false, severityError, "has other bytes"},
		{"the other side closes first", ok + body, true, severityWarning, "ends the connection of a download before the device"},
		{"no HTTP", "220 mail.example.com ESMTP\r\n", true, severityError, "gets no answer of HTTP: it begins with"},
		{"nothing", "", true, severityError, "the connection was closed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			link := serveRaw(t, func(conn net.Conn) {
				if _, err := conn.Write([]byte(c.answer)); err == nil && !c.closes {
					wait(conn)
				}
			})
			findings := checkDownload(t.Context(), &api.Probe{URL: link, Size: 500, SHA256: hex.EncodeToString(sum[:])})
			switch {
			case c.want == "":
				if len(findings) != 0 {
					t.Errorf("%+v", findings)
				}
			case len(findings) != 1 || findings[0].Severity != c.severity || !strings.Contains(findings[0].Message, c.want):
				t.Errorf("%+v; want %q", findings, c.want)
			}
		})
	}
	// What checkReach reports is not reported twice.
	if findings := checkDownload(t.Context(), &api.Probe{URL: "http://127.0.0.1:1/"}); len(findings) != 0 {
		t.Errorf("%+v", findings)
	}
	foreign := httptest.NewTLSServer(http.NotFoundHandler())
	defer foreign.Close()
	if findings := checkDownload(t.Context(), &api.Probe{URL: foreign.URL}); len(findings) != 0 {
		t.Errorf("%+v", findings)
	}
	host, port, _ := strings.Cut(strings.TrimPrefix(foreign.URL, "https://"), ":")
	if f, found := checkReach(t.Context(), target{host: host, port: port, tls: true, announce: "--public-device-url"}); !found || f.Severity != severityError || !strings.Contains(f.Message, "certificate") {
		t.Errorf("a foreign certificate: %+v", f)
	}
}

// TestDownloadIsBounded: a proxy that sends nothing more is left after some time.
func TestDownloadIsBounded(t *testing.T) {
	link := serveRaw(t, func(conn net.Conn) {
		_, _ = fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
		<-t.Context().Done()
	})
	before := probeTimeout
	probeTimeout = 300 * time.Millisecond
	defer func() { probeTimeout = before }()
	if findings := checkDownload(t.Context(), &api.Probe{URL: link, Size: 500}); len(findings) != 1 || !strings.Contains(findings[0].Message, "ends after 0 of 500 bytes") {
		t.Errorf("%+v", findings)
	}
}
