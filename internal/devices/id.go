package devices

import (
	"errors"
	"fmt"
	"strings"
)

// MaxIDLength is the longest device id that is not a MAC address, in bytes.
const MaxIDLength = 64

// ErrBadID is wrapped by every error of ParseID.
var ErrBadID = errors.New("not a device id")

// ID names one device. Its canonical form is `aa:bb:cc:dd:ee:ff` for a MAC
// address, else lower-case `[a-z0-9][a-z0-9_-]{0,63}`, never twelve hex digits.
// Text from outside must go through ParseID.
type ID string

// ParseID returns the canonical form of text. Twelve hex digits with `:`, `-` or nothing
// between the pairs are a MAC address (the firmware sends `aa:bb:cc:dd:ee:ff`,
// system_info.cc:35-47; MQTT client ids use other separators); anything else is
// lower-cased and checked. Errors wrap ErrBadID.
func ParseID(text string) (ID, error) {
	if id, ok := parseMAC(text); ok {
		return id, nil
	}
	if text == "" || len(text) > MaxIDLength {
		return "", fmt.Errorf("%w: it has %d bytes, 1 to %d are allowed", ErrBadID, len(text), MaxIDLength)
	}
	lower := []byte(text)
	for i, c := range lower {
		if c >= 'A' && c <= 'Z' { // only ASCII: other letters have no lower case here
			c |= 0x20
			lower[i] = c
		}
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || i > 0 && (c == '_' || c == '-') {
			continue
		}
		return "", fmt.Errorf("%w: %q at byte %d; use a MAC address or [a-z0-9][a-z0-9_-]*", ErrBadID, text[i:i+1], i)
	}
	return ID(lower), nil
}

// parseMAC accepts the three notations of a MAC address, but no mixture.
func parseMAC(text string) (ID, bool) {
	step := 3
	switch len(text) {
	case 12:
		step = 2
	case 17:
		if sep := text[2]; sep != ':' && sep != '-' {
			return "", false
		}
	default:
		return "", false
	}
	var out [17]byte
	for pair := range 6 {
		at := pair * step
		if step == 3 && pair > 0 && text[at-1] != text[2] {
			return "", false
		}
		for k := range 2 {
			c := text[at+k] | 0x20
			if text[at+k] >= '0' && text[at+k] <= '9' {
				c = text[at+k]
			} else if c < 'a' || c > 'f' {
				return "", false
			}
			out[pair*3+k] = c
		}
		if pair < 5 {
			out[pair*3+2] = ':'
		}
	}
	return ID(out[:]), true
}

// Token returns the id as one NATS subject token or MQTT topic level: without
// colons. The mapping is one to one, because an id that is not a MAC address
// is never twelve hex digits.
func (id ID) Token() string { return strings.ReplaceAll(string(id), ":", "") }

// MQTT topics of a device. It publishes to TopicUp, and reads every message on its
// connection (mqtt_protocol.cc:113). TopicDown is for clients that subscribe, and for
// brokers that subscribe for the device.

// TopicUp returns the topic that the device publishes to, `fleetd/<d>/up`.
func TopicUp(id ID) string { return "fleetd/" + id.Token() + "/up" }

// TopicDown returns the topic that fleetd publishes to, `fleetd/<d>/down`.
func TopicDown(id ID) string { return "fleetd/" + id.Token() + "/down" }
