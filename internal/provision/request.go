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
	values, own, err := members(body, described...)
	application, ownApplication, _ := members(values[2], "version", "elf_sha256")
	board, ownBoard, _ := members(values[6], "name", "type")
	c.Firmware, c.ELF, c.Board = text(application[0]), text(application[1]), cmp.Or(text(board[0]), text(board[1]))
	c.Chip = text(values[7])
	if c.ClientID == "" {
		c.ClientID = text(values[8])
	}
	if err == nil && own && ownApplication && ownBoard && isPlain(application[0]) && isPlain(board[0]) {
		c.Details = details(values[:6])
		return text(values[9])
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

// described are the members of a body that are read. The first six are those of devices.Details.
var described = []string{"flash_size", "chip_info", "application", "partition_table", "ota", "display", "board", "chip_model_name", "uuid", "mac_address"}

// members returns the first values of the named members of an object. own reports whether the object can be what the firmware meant: no member
// is there twice. The firmware escapes nothing, so that a text in it, such as the name of a Wi-Fi network, may bring members of its own.
func members(object []byte, names ...string) (values [][]byte, own bool, err error) {
	values, own = make([][]byte, len(names)), true
	seen := make([][]byte, 0, 16)
	walk := jsonspan.Object(object)
	for walk.Next() {
		name := walk.Key()
		own = own && len(seen) < maxMembers && !slices.ContainsFunc(seen, func(other []byte) bool { return bytes.Equal(other, name) })
		if own {
			seen = append(seen, name)
		}
		if at := slices.Index(names, string(name)); at >= 0 && values[at] == nil {
			values[at] = walk.Value()
		}
	}
	return values, own, walk.Err()
}

// isPlain reports whether a value has no escape sequence: this parser alone would read it.
func isPlain(value []byte) bool { return !bytes.ContainsRune(value, '\\') }

// details returns devices.Details with these values, untouched; empty if there is none.
func details(values [][]byte) string {
	var out strings.Builder
	out.Grow(1024)
	separator := `{"`
	for i, value := range values {
		if value != nil {
			out.WriteString(separator)
			out.WriteString(described[i])
			out.WriteString(`":`)
			out.Write(value)
			separator = `,"`
		}
	}
	switch {
	case out.Len() >= devices.MaxDetails:
		return devices.UnreadableDetails
	case out.Len() > 0:
		out.WriteByte('}')
	}
	return out.String()
}

func text(value []byte) string {
	text, _ := jsonspan.String(value)
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
