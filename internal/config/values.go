package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/timespan"
)

var (
	namePattern   = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	prefixPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){0,4}$`)
	hostPattern   = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\.?$`)
	pathPattern   = regexp.MustCompile(`^(/[A-Za-z0-9._~-]+)*$`)
	sizePattern   = regexp.MustCompile(`^([0-9]+)(KiB|MiB|GiB|TiB)?$`)
)

// checked stores a text that passes the check.
func checked(field func(*Config) *string, check func(string) error) func(*Config, string) error {
	return func(c *Config, value string) error {
		*field(c) = value
		return check(value)
	}
}

// optional stores a text that is empty or passes the check; a nil check takes anything.
func optional(field func(*Config) *string, check func(string) error) func(*Config, string) error {
	return func(c *Config, value string) error {
		*field(c) = value
		if value == "" || check == nil {
			return nil
		}
		return check(value)
	}
}

// text stores any text but the empty one.
func text(field func(*Config) *string) func(*Config, string) error {
	return checked(field, func(value string) error {
		if value == "" {
			return errors.New("must not be empty")
		}
		return nil
	})
}

// choice stores one of the allowed words.
func choice(field func(*Config) *string, allowed ...string) func(*Config, string) error {
	return checked(field, func(value string) error { return among(value, allowed...) })
}

// boolean stores true or false.
func boolean(field func(*Config) *bool) func(*Config, string) error {
	return func(c *Config, value string) error {
		*field(c) = value == "true"
		return among(value, "true", "false")
	}
}

// integer stores a whole number between low and high.
func integer(field func(*Config) *int, low, high int) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, err := strconv.Atoi(value)
		if err != nil || n < low || n > high {
			return fmt.Errorf("must be a whole number from %d to %d", low, high)
		}
		*field(c) = n
		return nil
	}
}

// duration stores a duration between low and high.
func duration(field func(*Config) *time.Duration, low, high time.Duration) func(*Config, string) error {
	return func(c *Config, value string) error {
		d, err := timespan.Parse(value)
		if err != nil || d < low || d > high {
			return fmt.Errorf("must be a duration such as 90s, 15m or 7d, from %s to %s", timespan.Format(low), timespan.Format(high))
		}
		*field(c) = d
		return nil
	}
}

// ParseSize reads a number of bytes, at least low, with a binary unit or without.
func ParseSize(value string, low int64) (int64, error) {
	if parts := sizePattern.FindStringSubmatch(value); parts != nil {
		n, err := strconv.ParseInt(parts[1], 10, 64)
		shift := map[string]uint{"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[parts[2]]
		if err == nil && n <= (1<<62)>>shift && n<<shift >= low {
			return n << shift, nil
		}
	}
	return 0, fmt.Errorf("must be a size such as 512MiB or 10GiB, at least %dKiB", low/kib)
}

// size stores a number of bytes.
func size(field func(*Config) *int64, low int64) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, err := ParseSize(value, low)
		if err == nil {
			*field(c) = n
		}
		return err
	}
}

// sizeOrNone is size, but 0 is allowed.
func sizeOrNone(field func(*Config) *int64, low int64) func(*Config, string) error {
	set := size(field, low)
	return func(c *Config, value string) error {
		if value == "0" {
			*field(c) = 0
			return nil
		}
		if err := set(c, value); err != nil {
			return fmt.Errorf("%w, or 0", err)
		}
		return nil
	}
}

func among(value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	last := len(allowed) - 1
	if last == 0 {
		return fmt.Errorf("must be %s", allowed[0])
	}
	return fmt.Errorf("must be %s or %s", strings.Join(allowed[:last], ", "), allowed[last])
}

// checkListen wants host:port or :port, with a numeric port; port 0 takes any free one.
func checkListen(value string) error {
	reason := errors.New("must be host:port or :port, with a port from 0 to 65535")
	host, port, err := net.SplitHostPort(value)
	if err != nil {
		return reason
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return reason
	}
	if _, err := netip.ParseAddr(host); host != "" && err != nil && !hostPattern.MatchString(host) {
		return reason
	}
	return nil
}

// checkPublicHost refuses what devices cannot dial: they take the first colon for the start of a port, so IPv6
// literals do not work.
func checkPublicHost(value string) error {
	reason := errors.New("must be an IPv4 address or a host name without scheme, port or path")
	if len(value) > 253 || !hostPattern.MatchString(value) {
		return reason
	}
	// Four numbers that are not an address, such as 300.1.1.1, would go out as a name that never resolves.
	if strings.Trim(value, "0123456789.") == "" {
		if _, err := netip.ParseAddr(value); err != nil {
			return reason
		}
	}
	return nil
}

// checkPublicURL follows the device's URL parser: the first colon after the scheme starts the port, wherever it
// is, and a text after it that is not a number aborts the device. The activation path is appended to the URL, so a
// query would contain it.
func checkPublicURL(value string) error {
	reason := errors.New("must be http://host[:port][/path] or https://host[:port][/path], with an IPv4 address or a name as host, and no user, query, fragment or colon in the path")
	u, err := url.Parse(value)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return reason
	}
	if checkPublicHost(u.Hostname()) != nil || strings.HasSuffix(u.Host, ":") || strings.HasPrefix(u.Host, "[") {
		return reason
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return reason
		}
	}
	if !pathPattern.MatchString(u.EscapedPath()) || strings.Contains(value, "#") {
		return reason
	}
	return nil
}

func checkDatabase(value string) error {
	if value == "sqlite" {
		return nil
	}
	if path, ok := strings.CutPrefix(value, "sqlite:"); ok && path != "" {
		return nil
	}
	u, err := url.Parse(value)
	if err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql") && u.Opaque == "" && len(u.Path)+len(u.Host)+len(u.RawQuery) > 0 {
		return nil
	}
	return errors.New("must be sqlite, sqlite:PATH or a URL such as postgres://user:password@host:5432/fleetd")
}

func checkNATS(value string) error {
	if value == "embedded" {
		return nil
	}
	for part := range strings.SplitSeq(value, ",") {
		u, err := url.Parse(strings.TrimSpace(part))
		if err != nil || (u.Scheme != "nats" && u.Scheme != "tls") || u.Hostname() == "" {
			return errors.New("must be embedded or a comma-separated list of URLs such as nats://host:4222")
		}
	}
	return nil
}

func checkMQTT(value string) error {
	if value == "embedded" || value == "off" {
		return nil
	}
	u, err := url.Parse(value)
	if err != nil || u.Scheme != "tcp" && u.Scheme != "ssl" || u.Hostname() == "" || u.Port() == "" || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("must be embedded, off, or a URL such as tcp://user:password@broker:1883 or ssl://broker:8883")
	}
	return nil
}

// checkPublicMQTT accepts what the device's parser accepts: everything after the first colon is the port.
func checkPublicMQTT(value string) error {
	reason := errors.New("must be host or host:port without a scheme, with an IPv4 address or a name as host")
	host, port, found := strings.Cut(value, ":")
	if checkPublicHost(host) != nil {
		return reason
	}
	if n, err := strconv.ParseUint(port, 10, 16); found && (err != nil || n == 0) {
		return reason
	}
	return nil
}

func checkPublicUDP(value string) error {
	if !strings.Contains(value, ":") || checkPublicMQTT(value) != nil {
		return errors.New("must be host:port, with an IPv4 address or a name as host")
	}
	return nil
}

func checkUpstream(value string) error {
	u, err := url.Parse(value)
	if err != nil || u.Scheme != "ws" && u.Scheme != "wss" || u.Hostname() == "" || u.Fragment != "" {
		return errors.New("must be a URL such as ws://host:8000/xiaozhi/v1/")
	}
	return nil
}

// checkVision refuses a password in the URL, which belongs in --vision-key, and the path that is appended to it.
func checkVision(value string) error {
	u, err := url.Parse(value)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.Fragment != "" ||
		strings.HasSuffix(u.Path, "/chat/completions") {
		return errors.New("must be a URL such as https://api.openai.com/v1, without a user and without /chat/completions, which is appended")
	}
	return nil
}

// checkLine wants what fits into the head of a request.
func checkLine(value string) error {
	if len(value) > 4096 || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }) {
		return errors.New("must be one line of printable ASCII, at most 4096 characters")
	}
	return nil
}

func checkPrefix(value string) error {
	if len(value) <= 64 && prefixPattern.MatchString(value) {
		return nil
	}
	return errors.New("must be one to five words of letters, digits, _ and - joined by dots, at most 64 characters")
}

func checkNode(value string) error {
	if namePattern.MatchString(value) {
		return nil
	}
	return errors.New("must be up to 64 letters, digits, _ and -")
}

func checkTimezone(value string) error {
	if validateZone(value) != nil {
		return errors.New("must be the IANA name of a time zone such as Europe/Berlin or UTC")
	}
	return nil
}

// setSecret cuts off surrounding white space, as the secret file does, so that both ways give the same key.
func setSecret(c *Config, value string) error {
	c.Secret = strings.TrimSpace(value)
	if value != "" && len(c.Secret) < minSecret {
		return fmt.Errorf("needs at least %d characters and has %d", minSecret, len(c.Secret))
	}
	return checkPlaceholder(c.Secret)
}

// placeholders are in the examples that fleetd comes with, and known to everybody.
var placeholders = []string{"change-me", "changeme"}

func checkPlaceholder(secret string) error {
	for _, text := range placeholders {
		if strings.Contains(strings.ToLower(secret), text) {
			return errors.New("is the placeholder of an example, which is public: make one with `openssl rand -hex 32`")
		}
	}
	return nil
}

// list stores comma-separated texts, each checked.
func list(field func(*Config) *[]string, check func(string) error) func(*Config, string) error {
	return func(c *Config, value string) error {
		for part := range strings.SplitSeq(value, ",") {
			part = strings.TrimSpace(part)
			if part == "" {
				continue
			}
			if err := check(part); err != nil {
				return err
			}
			*field(c) = append(*field(c), part)
		}
		return nil
	}
}

// checkWebhookAllow checks an entry as egress.Parse does.
func checkWebhookAllow(value string) error {
	if _, err := parsePrefix(value); err == nil {
		return nil
	}
	if strings.Contains(value, "/") || strings.Contains(value, ":") {
		return errors.New("must be comma-separated networks, addresses or names of hosts such as 10.0.0.0/8,192.0.2.7,hooks.example.com")
	}
	return checkHost(value)
}

// checkPublicAPIURL wants a URL that can be an issuer: https, or http on this machine, without a path (RFC 8414, 2).
func checkPublicAPIURL(value string) error {
	u, err := url.Parse(value)
	if err != nil || u.Host == "" || u.Path != "" || u.User != nil || u.RawQuery != "" || u.ForceQuery || strings.Contains(value, "#") || strings.ToLower(value) != value ||
		u.Scheme != "https" && (u.Scheme != "http" || !isLoopback(net.JoinHostPort(u.Hostname(), "80"))) {
		return errors.New("must be https://host[:port] in small letters, without a path, or http:// with a loopback address")
	}
	return nil
}

func checkHostGlob(value string) error {
	if len(value) > 253 || strings.Trim(value, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._*?:") != "" {
		return errors.New("must be comma-separated host names, in which * stands for anything")
	}
	return nil
}

func checkHost(value string) error {
	if len(value) > 253 || !hostPattern.MatchString(value) {
		return errors.New("must be comma-separated host names without scheme, port or path")
	}
	return nil
}

func checkOrigin(value string) error {
	u, err := url.Parse(value)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || value != u.Scheme+"://"+u.Host {
		return errors.New("must be comma-separated origins such as https://console.example.com, without path")
	}
	return nil
}

func setProxies(c *Config, value string) error {
	if strings.TrimSpace(value) == "" {
		return nil
	}
	for part := range strings.SplitSeq(value, ",") {
		prefix, err := parsePrefix(strings.TrimSpace(part))
		if err != nil {
			return errors.New("must be comma-separated networks or addresses such as 10.0.0.0/8,192.0.2.7")
		}
		c.TrustedProxies = append(c.TrustedProxies, prefix)
	}
	return nil
}

// parsePrefix reads a CIDR, or a bare address as the network of that one address.
func parsePrefix(value string) (netip.Prefix, error) {
	if prefix, err := netip.ParsePrefix(value); err == nil {
		return prefix.Masked(), nil
	}
	addr, err := netip.ParseAddr(value)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("read network: %w", err)
	}
	return addr.Prefix(addr.BitLen())
}
