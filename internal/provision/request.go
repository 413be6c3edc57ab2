package provision

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/jsonspan"
)

// MaxRequest is the longest OTA body that is read, in bytes; the firmware's has about 900,
// including a large partition table.
const MaxRequest = 32 << 10

// parseRequest returns the check-in of a request. Headers suffice to identify the device
// (ota.cc:55-72). The body only describes it and is read as far as possible: the firmware
// escapes nothing in it (board.cc:110-177), so an SSID with a quote makes it invalid JSON.
func parseRequest(r *http.Request) (admission.CheckIn, error) {
	c := admission.CheckIn{ClientID: r.Header.Get("Client-Id"), Facts: devices.Facts{
		Language:   headerText(r.Header.Get("Accept-Language")),
		Serial:     headerText(r.Header.Get("Serial-Number")),
		ActivateV2: r.Header.Get("Activation-Version") == "2",
	}}
	body, err := io.ReadAll(io.LimitReader(r.Body, MaxRequest+1))
	if err != nil {
		return c, fmt.Errorf("read body: %w", err)
	}
	if len(body) > MaxRequest {
		return c, fmt.Errorf("body is over %d bytes", MaxRequest)
	}
	mac := describe(body, &c)
	if board, firmware, found := strings.Cut(r.Header.Get("User-Agent"), "/"); found && c.Firmware == "" && isVersion(firmware) {
		c.Board, c.Firmware = headerText(board), firmware
	}
	// The reply contains it in the user name, in JSON, and the device's parser ends
	// text at a NUL.
	if !utf8.ValidString(c.ClientID) || strings.ContainsRune(c.ClientID, 0) {
		return c, errors.New("Client-Id is not valid UTF-8 or contains NUL")
	}
	id := cmp.Or(r.Header.Get("Device-Id"), mac)
	if id == "" {
		return c, errors.New("header Device-Id is missing")
	}
	c.Device, err = devices.ParseID(id)
	if err != nil {
		return c, fmt.Errorf("header Device-Id: %w", err)
	}
	return c, nil
}

// describe sets the fields that the body contains, and returns its MAC address.
func describe(body []byte, c *admission.CheckIn) (mac string) {
	var details strings.Builder
	details.Grow(min(len(body), devices.MaxDetails))
	own := isOwn(body, "")
	walk := jsonspan.Object(body)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "mac_address":
			mac, _ = jsonspan.String(value)
		case "uuid":
			if c.ClientID == "" {
				c.ClientID, _ = jsonspan.String(value)
			}
		case "chip_model_name":
			c.Chip, _ = jsonspan.String(value)
		case "application":
			own = own && isOwn(value, "version")
			addDetail(&details, "application", value)
			c.Firmware, c.ELF = member(value, "version"), member(value, "elf_sha256")
		case "flash_size", "chip_info", "partition_table", "ota", "display":
			addDetail(&details, string(walk.Key()), value)
		case "board":
			own = own && isOwn(value, "name")
			c.Board = member(value, "name")
			if c.Board == "" {
				c.Board = member(value, "type")
			}
		}
	}
	if walk.Err() == nil && own {
		if details.Len() > 0 {
			details.WriteByte('}')
			c.Details = details.String()
		}
		if len(c.Details) > devices.MaxDetails {
			c.Details = devices.UnreadableDetails
		}
		return mac
	}
	c.Details = devices.UnreadableDetails
	// Not JSON, or not what the firmware meant: find the members by the text around them, which
	// the firmware concatenates in a fixed order.
	c.Chip = after(body, `"chip_model_name":"`)
	c.ELF = after(body, `"elf_sha256":"`)
	if _, application, found := bytes.Cut(body, []byte(`"application":{`)); found {
		c.Firmware = after(application, `"version":"`)
	}
	if _, board, found := bytes.Cut(body, []byte(`"board":{`)); found {
		c.Board = after(board, `"name":"`)
	}
	return after(body, `"mac_address":"`)
}

// maxMembers is how many members the firmware's objects have at most, and some.
const maxMembers = 64

// isOwn reports whether an object can be what the firmware meant: no member is there twice, and the one called plain has no escape sequence. The
// firmware escapes nothing, so a text in it, such as the name of a Wi-Fi network, may bring members of its own, and an escape sequence in a
// version is read by this parser alone.
func isOwn(object []byte, plain string) bool {
	var names [][]byte
	walk := jsonspan.Object(object)
	for walk.Next() {
		name := walk.Key()
		twice := slices.ContainsFunc(names, func(other []byte) bool { return bytes.Equal(other, name) })
		if twice || len(names) == maxMembers || string(name) == plain && bytes.ContainsRune(walk.Value(), '\\') {
			return false
		}
		names = append(names, name)
	}
	return true // if it ends early it is not JSON, which the caller finds
}

// addDetail adds a member of devices.Details, untouched.
func addDetail(details *strings.Builder, name string, value []byte) {
	separator := `,"`
	if details.Len() == 0 {
		separator = `{"`
	}
	details.WriteString(separator)
	details.WriteString(name)
	details.WriteString(`":`)
	details.Write(value)
}

func member(object []byte, name string) string {
	text, _ := jsonspan.String(jsonspan.Member(object, name))
	return text
}

// after returns the plain text between mark and the next quote.
func after(body []byte, mark string) string {
	_, rest, found := bytes.Cut(body, []byte(mark))
	text, _, ended := bytes.Cut(rest, []byte(`"`))
	if !found || !ended || len(text) > 128 || bytes.ContainsAny(text, "\\\x00\n") {
		return ""
	}
	return strings.ToValidUTF8(string(text), "\uFFFD")
}

// headerText returns a header as valid UTF-8; headers may contain any bytes.
func headerText(header string) string { return strings.ToValidUTF8(header, "\uFFFD") }
