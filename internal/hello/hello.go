// Package hello encodes and decodes the handshake that opens a conversation: one JSON
// document from the device, one from the server.
//
// The device sends the first (websocket_protocol.cc:198-222, version 3 with
// transport "udp" over MQTT, mqtt_protocol.cc:351-375):
//
//	{"type":"hello","version":1,"features":{"mcp":true,"glyph_push":true},
//	 "text_font":{...},"transport":"websocket",
//	 "audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}
//
// The server answers once, promptly, and always with a string `transport`:
// without it every known firmware version reboots
// (websocket_protocol.cc:226-227). A second answer, or one after 10 s, breaks
// the device's next connection.
package hello

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fleetd/internal/jsonspan"
)

// Transports as named in hello documents.
const (
	TransportWebSocket = "websocket"
	TransportUDP       = "udp"
)

// ErrInvalid is what the errors of ParseDevice wrap, all but those of jsonspan.
var ErrInvalid = errors.New("not a valid hello")

// AudioParams describe one direction of audio. FrameDuration is in
// milliseconds, SampleRate in hertz.
type AudioParams struct {
	SampleRate    int
	Channels      int
	FrameDuration int
}

// DeviceAudio contains the values that firmware sends (audio_service.h:65-76), which also
// replace an absent audio_params.
var DeviceAudio = AudioParams{SampleRate: 16000, Channels: 1, FrameDuration: 60}

// ServerAudio is the default downlink that fleetd announces.
var ServerAudio = AudioParams{SampleRate: 24000, Channels: 1, FrameDuration: 60}

// Device is a device's hello.
type Device struct {
	Version   int    // as in the Protocol-Version header; 0 if absent
	Transport string // "websocket", "udp"; a fork's "mqtt" counts as "udp"; empty if absent
	MCP       bool   // features.mcp
	AEC       bool   // features.aec: a server-AEC build
	GlyphPush bool   // features.glyph_push: present from v2.4.0 on
	Features  []byte // the raw object, copied; nil if absent
	TextFont  []byte // the raw object, copied; nil if absent
	Audio     AudioParams
}

// ParseDevice reads a device's hello. Unknown members are ignored, absent
// ones take the firmware's values, but a member of the wrong type or an
// impossible value is refused, since it shows that the sender is faulty.
func ParseDevice(msg []byte) (Device, error) {
	d := Device{Audio: DeviceAudio}
	var seen [len(members)]bool
	walk := jsonspan.Object(msg)
	for walk.Next() {
		i := slices.Index(members[:], string(walk.Key()))
		if i < 0 || seen[i] {
			continue // as in cJSON, the first of duplicate keys counts
		}
		seen[i] = true
		if err := d.set(members[i], walk.Value()); err != nil {
			return Device{}, err
		}
	}
	if err := walk.Err(); err != nil {
		return Device{}, fmt.Errorf("hello: %w", err)
	}
	if !seen[0] {
		return Device{}, fmt.Errorf("%w: no member \"type\"", ErrInvalid)
	}
	return d, nil
}

// members of a device's hello that are read. The first one must be there.
var members = [...]string{"type", "version", "transport", "features", "text_font", "audio_params"}

func (d *Device) set(member string, value []byte) error {
	switch member {
	case "type":
		if text, ok := jsonspan.StringBytes(value); !ok || string(text) != "hello" {
			return fmt.Errorf("%w: the first message must have \"type\":\"hello\", this has %.40s", ErrInvalid, value)
		}
	case "version":
		n, ok := jsonspan.Int(value)
		if !ok || n < 0 || n > 1000 {
			return fmt.Errorf("%w: \"version\" must be a small number, this is %.40s", ErrInvalid, value)
		}
		d.Version = int(n)
	case "transport":
		text, ok := jsonspan.StringBytes(value)
		switch {
		case ok && string(text) == TransportWebSocket:
			d.Transport = TransportWebSocket
		case ok && (string(text) == TransportUDP || string(text) == "mqtt"):
			d.Transport = TransportUDP
		default:
			return fmt.Errorf("%w: \"transport\" must be \"websocket\" or \"udp\", this is %.40s", ErrInvalid, value)
		}
	case "features":
		return d.features(value)
	case "text_font":
		if jsonspan.KindOf(value) == jsonspan.KindObject {
			d.TextFont = append([]byte(nil), value...)
		}
	case "audio_params":
		return d.Audio.set(value)
	}
	return nil
}

// features reads the feature flags. Only JSON true counts, as on the device.
func (d *Device) features(value []byte) error {
	d.Features = append([]byte(nil), value...)
	walk := jsonspan.Object(value)
	for walk.Next() {
		on := jsonspan.KindOf(walk.Value()) == jsonspan.KindTrue
		switch string(walk.Key()) {
		case "mcp":
			d.MCP = d.MCP || on
		case "aec":
			d.AEC = d.AEC || on
		case "glyph_push":
			d.GlyphPush = d.GlyphPush || on
		}
	}
	if walk.Err() != nil {
		return fmt.Errorf("%w: \"features\" must be an object, this is %.40s", ErrInvalid, value)
	}
	return nil
}

func (a *AudioParams) set(value []byte) error {
	walk := jsonspan.Object(value)
	for walk.Next() {
		var field *int
		switch string(walk.Key()) {
		case "sample_rate":
			field = &a.SampleRate
		case "channels":
			field = &a.Channels
		case "frame_duration":
			field = &a.FrameDuration
		default:
			continue
		}
		n, ok := jsonspan.Int(walk.Value())
		if !ok || n < 0 || n > 1_000_000 {
			return fmt.Errorf("%w: audio_params.%s is %.40s", ErrInvalid, walk.Key(), walk.Value())
		}
		*field = int(n)
	}
	if walk.Err() != nil {
		return fmt.Errorf("%w: \"audio_params\" must be an object, this is %.40s", ErrInvalid, value)
	}
	return a.Check()
}

// Check refuses what Opus cannot carry: rates other than 8, 12, 16, 24 and
// 48 kHz, durations the firmware's decoder does not accept
// (audio_service.h:55-63), more than two channels.
func (a AudioParams) Check() error {
	switch a.SampleRate {
	case 8000, 12000, 16000, 24000, 48000:
	default:
		return fmt.Errorf("%w: Opus has no sample rate of %d Hz", ErrInvalid, a.SampleRate)
	}
	switch a.FrameDuration {
	case 5, 10, 20, 40, 60, 80, 100, 120:
	default:
		return fmt.Errorf("%w: frame_duration of %d ms; 5, 10, 20, 40, 60, 80, 100 and 120 exist", ErrInvalid, a.FrameDuration)
	}
	if a.Channels != 1 && a.Channels != 2 {
		return fmt.Errorf("%w: %d channels", ErrInvalid, a.Channels)
	}
	return nil
}

// Server is the server's answer.
type Server struct {
	Transport string // TransportWebSocket or TransportUDP
	SessionID string // new for each hello, [A-Za-z0-9_-]+: the device echoes it unescaped
	Audio     AudioParams
	UDP       *UDP // with TransportUDP, and only then
}

// UDP contains the address to which the device sends audio, and its encryption key.
type UDP struct {
	Server     string   // IPv4 address or host name: the device does not support IPv6 (esp_udp.cc)
	Port       uint16   // never 0
	Key, Nonce [16]byte // AES-128-CTR
}

// Append appends the answer. It fails on a document that firmware would crash
// on or misread, so that no caller can send one.
func (s Server) Append(dst []byte) ([]byte, error) {
	if s.Transport != TransportWebSocket && s.Transport != TransportUDP {
		return dst, fmt.Errorf("%w: server hello with transport %q reboots the device", ErrInvalid, s.Transport)
	}
	if !isPlain(s.SessionID, 64, "") {
		return dst, fmt.Errorf("%w: session id %q must be 1 to 64 of [A-Za-z0-9_-]", ErrInvalid, s.SessionID)
	}
	if err := s.Audio.Check(); err != nil {
		return dst, err
	}
	if (s.Transport == TransportUDP) != (s.UDP != nil) {
		return dst, fmt.Errorf("%w: a hello for %s with or without udp section", ErrInvalid, s.Transport)
	}
	if s.UDP != nil {
		if err := s.UDP.check(); err != nil {
			return dst, err
		}
	}
	dst = fmt.Appendf(dst, `{"type":"hello","transport":"%s","session_id":"%s","audio_params":{"format":"opus","sample_rate":%d,"channels":%d,"frame_duration":%d}`,
		s.Transport, s.SessionID, s.Audio.SampleRate, s.Audio.Channels, s.Audio.FrameDuration)
	if s.UDP != nil {
		dst = fmt.Appendf(dst, `,"udp":{"server":"%s","port":%d,"encryption":"aes-128-ctr","key":"%x","nonce":"%x"}`, s.UDP.Server, s.UDP.Port, s.UDP.Key, s.UDP.Nonce)
	}
	return append(dst, '}'), nil
}

// check refuses an address that firmware would ignore, or crash on before
// v2.4.0 (mqtt_protocol.cc:377-467).
func (u *UDP) check() error {
	ip, err := netip.ParseAddr(u.Server)
	if err == nil && !ip.Is4() {
		return fmt.Errorf("%w: udp.server %s must be an IPv4 address or a name", ErrInvalid, u.Server)
	}
	if err != nil && !isPlain(u.Server, 253, ".") {
		return fmt.Errorf("%w: udp.server %q is not a valid host name", ErrInvalid, u.Server)
	}
	if u.Port == 0 {
		return fmt.Errorf("%w: udp.port is 0", ErrInvalid)
	}
	return nil
}

// plain are the bytes of ids and names that need no escape.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

// isPlain reports whether a text has 1 to limit bytes, all of them plain or one of also.
func isPlain(text string, limit int, also string) bool {
	return text != "" && len(text) <= limit && strings.Trim(text, plain+also) == ""
}
