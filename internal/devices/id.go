package devices

import (
	"errors"
	"fmt"
	"strings"

	"fleetd/internal/selector"
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
	if mac, ok := selector.MAC(text); ok {
		return ID(mac), nil
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
