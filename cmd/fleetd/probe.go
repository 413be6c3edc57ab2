package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
)

const (
	// firstClose is how long the other side must leave the connection open after the last byte.
	firstClose = time.Second
	// maxHead is how many bytes the headers may have: firmware up to v2.1 needs the beginning of the body in the same read.
	maxHead = 1200
	// maxHeadRead is how many bytes of headers are read.
	maxHeadRead = 16 << 10
)

// probeTimeout bounds a whole download of the probe, which the node serves in a few seconds. Tests shorten it.
var probeTimeout = 20 * time.Second

// downloadAnswer is the head of an answer as it came: names of headers are compared as they are written by some devices.
type downloadAnswer struct {
	status string // such as 200 OK
	header []string
	bytes  int
}

// value returns a header, and its name as the other side wrote it.
func (d *downloadAnswer) value(name string) (value, written string) {
	for _, line := range d.header {
		if before, after, ok := strings.Cut(line, ":"); ok && strings.EqualFold(before, name) {
			return strings.TrimSpace(after), before
		}
	}
	return "", ""
}

// checkDownload fetches the probe as a device fetches an image (ota.cc:267-387), and returns what would break that download. What
// checkReach finds, it leaves out.
func checkDownload(ctx context.Context, probe *api.Probe) (findings []api.Finding) {
	add := func(severity, format string, args ...any) {
		findings = append(findings, api.Finding{Severity: severity, Setting: "--public-device-url", Message: fmt.Sprintf(format, args...)})
	}
	u, err := url.Parse(probe.URL)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := dialProbe(ctx, u)
	if err != nil {
		return nil
	}
	defer conn.Close()
	end, _ := ctx.Deadline()
	_ = conn.SetDeadline(end)
	begun := time.Now()
	_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", u.RequestURI(), u.Host)
	in := bufio.NewReader(conn)
	var answer downloadAnswer
	if err == nil {
		answer, err = readHead(in)
	}
	if err != nil {
		add(severityError, "a download from %s gets no answer of HTTP: %v", u.Host, err)
		return findings
	}
	if location, _ := answer.value("Location"); strings.HasPrefix(answer.status, "3") {
		add(severityError, "a download from %s is redirected to %s, and devices follow no redirect; give the URL that answers", u.Host, cmp.Or(location, "another place"))
		return findings
	}
	if !strings.HasPrefix(answer.status, "200") {
		add(severityError, "a download from %s is answered with %s, and devices take 200 alone; let the proxy pass /xiaozhi/f/ to the nodes, untouched", u.Host, answer.status)
		return findings
	}
	if coding, _ := answer.value("Transfer-Encoding"); coding != "" {
		add(severityError, "a download from %s comes with Transfer-Encoding: %s, and devices need Content-Length; switch that off in the proxy", u.Host, coding)
		return findings
	}
	if coding, _ := answer.value("Content-Encoding"); coding != "" {
		add(severityError, "a download from %s is compressed (%s), which devices cannot read and did not ask for; switch that off in the proxy", u.Host, coding)
	}
	text, written := answer.value("Content-Length")
	length, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil:
		add(severityError, "a download from %s has no Content-Length, which devices need", u.Host)
		return findings
	case written != "Content-Length":
		add(severityWarning, "a download from %s has the header %s; boards with an ML307 modem want it written as Content-Length", u.Host, written)
	}
	if answer.bytes > maxHead {
		add(severityWarning, "the headers of a download from %s have %d bytes; with more than %d, firmware up to v2.1 fails", u.Host, answer.bytes, maxHead)
	}
	sum := sha256.New()
	n, err := io.CopyN(sum, in, length)
	switch {
	case err != nil:
		add(severityError, "a download from %s ends after %d of %d bytes, %.1f s after it began (%v); a proxy may cut what takes longer, and images take minutes", u.Host, n, length, time.Since(begun).Seconds(), causeOf(err))
		return findings
	case length != probe.Size || hex.EncodeToString(sum.Sum(nil)) != probe.SHA256:
		if len(findings) == 0 {
			add(severityError, "a download from %s has other bytes than the node sent; switch off what changes them", u.Host)
		}
		return findings
	}
	_ = conn.SetReadDeadline(time.Now().Add(firstClose))
	if _, err := in.ReadByte(); err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
		add(severityWarning, "%s ends the connection of a download before the device does, with which firmware v2.2 to v2.4 may crash; let the proxy wait a few seconds for the device", u.Host)
	}
	return findings
}

// dialProbe connects as a device would, which trusts public authorities.
func dialProbe(ctx context.Context, u *url.URL) (net.Conn, error) {
	port := u.Port()
	if u.Scheme == "https" {
		d := tls.Dialer{Config: &tls.Config{ServerName: u.Hostname()}}
		return d.DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), cmp.Or(port, "443")))
	}
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), cmp.Or(port, "80")))
}

// readHead reads the status and the headers of an answer.
func readHead(in *bufio.Reader) (answer downloadAnswer, err error) {
	for {
		line, err := in.ReadString('\n')
		if answer.bytes += len(line); err != nil || answer.bytes > maxHeadRead {
			return answer, cmp.Or(causeOf(err), errors.New("its headers do not end"))
		}
		line = strings.TrimRight(line, "\r\n")
		switch {
		case answer.status == "":
			protocol, status, _ := strings.Cut(line, " ")
			if !strings.HasPrefix(protocol, "HTTP/1.") || status == "" {
				return answer, fmt.Errorf("it begins with %.40q", line)
			}
			answer.status = status
		case line == "":
			return answer, nil
		default:
			answer.header = append(answer.header, line)
		}
	}
}

// causeOf words the end of a connection.
func causeOf(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the connection was closed")
	}
	return err
}
