package speech

import (
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
)

// MaxMessage is the maximum size of a message for a device, in bytes. Firmware up to v2.1.0
// keeps two copies of a message in about 100 KB of free memory.
const MaxMessage = 32 << 10

// IsSpeech reports whether a type of message is part of a conversation.
func IsSpeech(kind string) bool {
	switch kind {
	case "tts", "stt", "llm", "listen", "abort", "goodbye":
		return true
	}
	return false
}

// checkedMembers are the members that the device reads and that are checked here.
var checkedMembers = []string{"type", "session_id", "state", "status", "message", "emotion", "text"}

// CheckMessage checks a message, and returns its type and the message to send: in text for
// people, U+FFFD replaces characters that would make the device drop all or the rest of it.
func CheckMessage(body []byte) (kind string, sent []byte, err error) {
	if kind, err = messageKind(body); err != nil {
		return kind, body, err
	}
	if IsSpeech(kind) || kind == "alert" {
		return kind, jsonspan.RepairText(body), nil
	}
	return kind, body, devices.CheckText("message", body)
}

func messageKind(body []byte) (string, error) {
	if len(body) > MaxMessage {
		return "", devices.Errorf(devices.CodeTooLarge, "the message has %d bytes, at most %d are allowed", len(body), MaxMessage)
	}
	m, err := envelope.Parse(body)
	if err != nil {
		return "", devices.Errorf(devices.CodeBadRequest, `the message must be a JSON object with a string "type": %v`, err)
	}
	// The device ignores the case of member names (cJSON), and would read the first member
	// that matches.
	for walk := jsonspan.Object(body); walk.Next(); {
		key, _, cut := strings.Cut(string(walk.Key()), "\x00") // the device's reader stops at the NUL
		for _, name := range checkedMembers {
			if (cut || key != name) && strings.EqualFold(key, name) {
				return "", devices.Errorf(devices.CodeBadRequest, "the message has a member %q: the device reads it as its %s; write it in lower case or leave it out", devices.Clip(key), name)
			}
		}
	}
	if !IsWord(string(m.Type)) {
		return "", devices.Errorf(devices.CodeBadRequest, "the message's type must be 1 to %d of [A-Za-z0-9_.-]: the device would read other text as a different type", MaxWord)
	}
	switch kind := string(m.Type); kind {
	case envelope.TypeMCP:
		return "", devices.Errorf(devices.CodeForbidden, "mcp is reserved for fleetd: use the call and mcp routes to call tools")
	case "hello":
		return "", devices.Errorf(devices.CodeForbidden, "hello is reserved for fleetd: a second one breaks the device's next connection")
	case "tts":
		// Firmware up to v2.3.0 crashes on a tts message without state.
		if !hasString(body, "state") {
			return "", devices.Errorf(devices.CodeBadRequest, `a tts message needs a string "state", such as start, sentence_start or stop`)
		}
		return kind, nil
	case "alert":
		for _, name := range []string{"status", "message", "emotion"} {
			if !hasString(body, name) {
				return "", devices.Errorf(devices.CodeBadRequest, `an alert needs the strings "status", "message" and "emotion"; %q is missing`, name)
			}
		}
		return kind, nil
	default:
		return kind, nil
	}
}

// MaxWord is the maximum length of a message type or a method, in bytes.
const MaxWord = 64

// IsWord reports whether the device reads text as fleetd does. Its reader ends a string at the
// first NUL (cJSON, std::string from a char pointer), so a text with one would be another
// text there.
func IsWord(text string) bool {
	for _, c := range []byte(text) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_', c == '.', c == '-', c == '/', c == '$':
		default:
			return false
		}
	}
	return text != "" && len(text) <= MaxWord
}

func hasString(object []byte, name string) bool {
	return jsonspan.KindOf(jsonspan.Member(object, name)) == jsonspan.KindString
}

// WithSession adds the session id that devices expect, if the sender left it out.
func WithSession(body []byte, id string) []byte {
	if jsonspan.Member(body, "session_id") != nil {
		return body
	}
	return jsonspan.WithString(body, "session_id", id)
}

// Send queues one message of a voice service for the device.
func (c *Conversation) Send(principal access.Principal, body []byte) error {
	kind, body, err := CheckMessage(body)
	if err := c.svc.opt.Guard.PermitSpeech(principal, c.line.Device(), kind, err); err != nil {
		return err
	}
	if !c.line.Connected() {
		return devices.Errorf(devices.CodeDeviceOffline, "device %s is reconnecting", c.line.Device())
	}
	return c.SendMessage(kind, WithSession(body, c.id))
}
