package firmware

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

var (
	errURL = errors.New("not a URL to the device")
	// errStoi marks input on which std::stoi throws; the firmware has no handler, so the chip aborts and restarts.
	errStoi = errors.New("std::stoi aborts the device")
)

// deviceURL is a URL as the firmware takes it apart.
type deviceURL struct {
	scheme string
	host   string
	port   int
	path   string
	secure bool
}

// parseWSURL follows WebSocket::Connect (esp-ml307 src/web_socket.cc:69-100): the first colon anywhere after the
// scheme starts the port.
func parseWSURL(s string) (deviceURL, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		return deviceURL{}, fmt.Errorf("%w: %q has no scheme", errURL, s)
	}
	u := deviceURL{scheme: scheme, port: 80, path: "/", secure: scheme == "wss" || scheme == "https"}
	if scheme == "wss" {
		u.port = 443
	}
	host, after, hasPort := strings.Cut(rest, ":")
	if !hasPort {
		if i := strings.IndexByte(rest, '/'); i >= 0 {
			u.host, u.path = rest[:i], rest[i:]
		} else {
			u.host = rest
		}
		return u, nil
	}
	u.host = host
	port := after
	if i := strings.IndexByte(after, '/'); i >= 0 {
		port, u.path = after[:i], after[i:]
	}
	n, err := stoi(port)
	if err != nil {
		return deviceURL{}, fmt.Errorf("port %q of %q: %w", port, s, err)
	}
	u.port = n
	return u, nil
}

// parseHTTPURL follows HttpClient::ParseUrl (esp-ml307 src/http_client.cc:59-112).
func parseHTTPURL(s string) (deviceURL, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		return deviceURL{}, fmt.Errorf("%w: %q has no scheme", errURL, s)
	}
	u := deviceURL{scheme: strings.ToLower(scheme), port: 80, path: "/"}
	if u.scheme == "https" {
		u.port, u.secure = 443, true
	}
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		rest, u.path = rest[:i], rest[i:]
	}
	host, port, hasPort := strings.Cut(rest, ":")
	u.host = host
	if hasPort {
		n, err := strconv.Atoi(port)
		if err != nil || n <= 0 || n > 65535 {
			return deviceURL{}, fmt.Errorf("%w: bad port in %q", errURL, s)
		}
		u.port = n
	}
	return u, nil
}

// stoi is std::stoi: leading white space and sign, then digits, then anything.
func stoi(s string) (int, error) {
	t := strings.TrimLeft(s, " \t\n\v\f\r")
	i := 0
	if i < len(t) && (t[i] == '+' || t[i] == '-') {
		i++
	}
	from := i
	for i < len(t) && t[i] >= '0' && t[i] <= '9' {
		i++
	}
	if i == from {
		return 0, errStoi
	}
	n, err := strconv.ParseInt(t[:i], 10, 64)
	if err != nil || n > math.MaxInt32 || n < math.MinInt32 {
		return 0, errStoi
	}
	return int(n), nil
}

// versionParts is ParseVersion (main/ota.cc:394-404).
func versionParts(s string) ([]int, error) {
	if s == "" {
		return nil, nil
	}
	fields := strings.Split(s, ".")
	// std::getline yields no field after a trailing separator.
	if fields[len(fields)-1] == "" {
		fields = fields[:len(fields)-1]
	}
	parts := make([]int, len(fields))
	for i, f := range fields {
		n, err := stoi(f)
		if err != nil {
			return nil, fmt.Errorf("version %q: %w", s, err)
		}
		parts[i] = n
	}
	return parts, nil
}

// newerVersion is IsNewVersionAvailable: numbers part by part, then the longer one.
func newerVersion(current, offered string) (bool, error) {
	a, err := versionParts(current)
	if err != nil {
		return false, err
	}
	b, err := versionParts(offered)
	if err != nil {
		return false, err
	}
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return b[i] > a[i], nil
		}
	}
	return len(b) > len(a), nil
}
