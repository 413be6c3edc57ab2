package provision

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf16"

	"fleetd/internal/jsonspan"
)

// Limits of an OTA reply. The device's HTTP client hangs at 8,192 bytes (esp-ml307
// http_client.cc:258-276); its flash refuses longer keys and values, which aborts it at
// every boot (settings.cc:40-68).
const (
	MaxReply  = 6 << 10
	MaxKey    = 15
	MaxString = 4000
)

// ErrUnsafe is wrapped by every refusal of Check.
var ErrUnsafe = errors.New("the OTA reply would make a device unusable")

func unsafeError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsafe, fmt.Sprintf(format, args...))
}

// Check accepts only replies that are safe for every firmware. The error names the way in
// which a reply would disconnect a device permanently or send it into a boot loop. Every
// reply is checked before it is sent.
func Check(reply []byte) error {
	if len(reply) > MaxReply {
		return unsafeError("it has %d bytes; the device hangs at 8,192, and the limit is %d", len(reply), MaxReply)
	}
	if err := checkEscapes(reply); err != nil {
		return err
	}
	sections := map[string]bool{}
	walk := jsonspan.Object(reply)
	for walk.Next() {
		name := strings.ToLower(string(walk.Key())) // the device ignores the case of names
		if sections[name] {
			return unsafeError("section %q appears twice", name)
		}
		sections[name] = true
		if err := checkSection(name, walk.Value()); err != nil {
			return err
		}
	}
	if err := walk.Err(); err != nil {
		return unsafeError("%v", err)
	}
	if sections["firmware"] && sections["activation"] {
		return unsafeError("it contains both firmware and activation; the device tries the image again with every round of its activation")
	}
	if sections["mqtt"] && sections["websocket"] {
		return unsafeError("it contains both mqtt and websocket; the device uses mqtt")
	}
	return nil
}

// checkEscapes refuses escapes that the device's JSON parser reads differently: it ends text
// at a NUL, and cannot parse a reply with half of a surrogate pair. No reply needs either.
func checkEscapes(reply []byte) error {
	for i := 0; i < len(reply); i++ {
		if reply[i] != '\\' {
			continue
		}
		i++ // the second of two backslashes starts no escape
		if i+5 > len(reply) || reply[i] != 'u' {
			continue
		}
		code, err := strconv.ParseUint(string(reply[i+1:i+5]), 16, 16)
		if err == nil && (code == 0 || utf16.IsSurrogate(rune(code))) {
			return unsafeError("it contains the escape \\%s, which the device cannot read", reply[i:i+5])
		}
	}
	return nil
}

func checkSection(name string, section []byte) error {
	walk := jsonspan.Object(section)
	for walk.Next() {
		key, value := string(walk.Key()), walk.Value()
		stored := name == "mqtt" || name == "websocket"
		if stored && len(key) > MaxKey {
			return unsafeError("the key %s.%s has %d characters; the device's flash stores at most %d: boot loop", name, key, len(key), MaxKey)
		}
		text, isText := jsonspan.String(value)
		if isText && len(text) >= MaxString {
			return unsafeError("%s.%s has %d bytes; the device's flash stores less than %d: boot loop", name, key, len(text), MaxString)
		}
		if err := checkMember(name+"."+strings.ToLower(key), text, isText, value); err != nil {
			return err
		}
	}
	if err := walk.Err(); err != nil {
		return unsafeError("section %q: %v", name, err)
	}
	return nil
}

func checkMember(path, text string, isText bool, value []byte) error {
	switch path {
	case "mqtt.endpoint":
		if !isText {
			return unsafeError("%s is not a string", path)
		}
		return checkEndpoint(text)
	case "websocket.url":
		if !isText {
			return unsafeError("%s is not a string", path)
		}
		return checkDialURL(path, text, "ws", "wss")
	case "firmware.url":
		if text == "" {
			return nil
		}
		return checkDialURL(path, text, "http", "https")
	case "firmware.version":
		if !isText || !isVersion(text) {
			return unsafeError("%s is %s; it must contain only numbers and dots, otherwise std::stoi aborts: boot loop", path, value)
		}
	case "websocket.version", "mqtt.keepalive":
		if _, ok := jsonspan.Int(value); !ok {
			return unsafeError("%s must be a number; the device reads a string as 0", path)
		}
	case "firmware.force":
		if n, ok := jsonspan.Int(value); !ok || n != 0 && n != 1 {
			return unsafeError("%s must be the number 0 or 1", path)
		}
	}
	return nil
}

// checkEndpoint requires `host:port`. The text after the first colon is passed to an
// unguarded std::stoi (mqtt_protocol.cc:148-157), and without a port devices use TLS at 8883.
func checkEndpoint(endpoint string) error {
	host, port, found := strings.Cut(endpoint, ":")
	if host == "" || strings.ContainsAny(host, "/[] ") {
		return unsafeError("mqtt.endpoint %q must be host:port without a scheme: boot loop", endpoint)
	}
	if n, err := strconv.ParseUint(port, 10, 16); !found || err != nil || n == 0 {
		return unsafeError("mqtt.endpoint %q must end in a port: boot loop", endpoint)
	}
	return nil
}

// checkDialURL checks a URL for the device's own parser: the first colon after the scheme
// starts the port (web_socket.cc:69-112), and it supports neither IPv6 literals nor user
// info.
func checkDialURL(path, text string, schemes ...string) error {
	u, err := url.Parse(text)
	if err != nil {
		return unsafeError("%s %q: %v", path, text, err)
	}
	if u.Scheme != schemes[0] && u.Scheme != schemes[1] {
		return unsafeError("%s %q must start with %s:// or %s://", path, text, schemes[0], schemes[1])
	}
	if u.Hostname() == "" || strings.ContainsAny(u.Hostname(), ":[]") {
		return unsafeError("%s %q must contain a host name or an IPv4 address; the device does not support IPv6 addresses", path, text)
	}
	if u.User != nil {
		return unsafeError("%s %q must not contain user info", path, text)
	}
	rest := strings.TrimPrefix(text, u.Scheme+"://"+u.Host)
	if strings.Contains(rest, ":") || strings.HasSuffix(u.Host, ":") {
		return unsafeError("%s %q has a colon without a port; the device parses a port after each colon and aborts", path, text)
	}
	if rest != "" && rest[0] != '/' {
		return unsafeError("%s %q has characters between host and path, which the device takes as part of the host", path, text)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return unsafeError("%s %q: invalid port %s", path, text, port)
		}
	}
	return nil
}

// isVersion reports whether text matches ^\d+(\.\d+)*$ with parts within std::stoi's range.
func isVersion(text string) bool {
	for part := range strings.SplitSeq(text, ".") {
		if _, err := strconv.ParseUint(part, 10, 31); err != nil {
			return false
		}
	}
	return true
}

// reply is the OTA reply; empty sections are not sent. Order and names are those that the
// firmware reads (ota.cc:103-245).
type reply struct {
	Activation *activation `json:"activation,omitempty"`
	MQTT       *mqtt       `json:"mqtt,omitempty"`
	WebSocket  *webSocket  `json:"websocket,omitempty"`
	ServerTime serverTime  `json:"server_time"`
	Firmware   *image      `json:"firmware,omitempty"`
}

// image is what the device installs. The firmware takes the integer 1 for force, and true only in some versions.
type image struct {
	Version string `json:"version"`
	URL     string `json:"url"`
	Force   int    `json:"force,omitempty"`
}

type activation struct {
	Message   string `json:"message"`
	Code      string `json:"code"`
	Challenge string `json:"challenge"`
	TimeoutMS int    `json:"timeout_ms"`
}

// mqtt has names of at most 15 characters, the length of subscribe_topic. The firmware reads
// all but subscribe_topic (mqtt_protocol.cc:77-83).
type mqtt struct {
	Endpoint       string `json:"endpoint"`
	ClientID       string `json:"client_id"`
	Username       string `json:"username"` // empty clears one stored earlier
	Password       string `json:"password"`
	PublishTopic   string `json:"publish_topic"`
	SubscribeTopic string `json:"subscribe_topic"` // for clients that subscribe
	Keepalive      int    `json:"keepalive"`       // seconds
}

type webSocket struct {
	URL     string `json:"url"`
	Token   string `json:"token"` // empty clears one stored earlier
	Version int    `json:"version"`
}

type serverTime struct {
	Timestamp      int64  `json:"timestamp"` // milliseconds since 1970
	TimeZone       string `json:"timeZone"`
	TimezoneOffset int    `json:"timezone_offset"` // minutes; the device's clock runs in local time
}

// encode returns the checked JSON of a reply.
func (r reply) encode() ([]byte, error) {
	out, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode OTA reply: %w", err)
	}
	return out, Check(out)
}
