package gatewayapi

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// BodyLimit is how many bytes a request body may have: the 100 kB of Express.
const BodyLimit = 100 << 10

// read returns the whole body, regardless of its content type; if that fails it
// responds with refuse, with the statuses of Express.
func (x *exchange) read(refuse func(status int, code devices.Code, text string)) (body []byte, ok bool) {
	body, err := io.ReadAll(http.MaxBytesReader(x.w, x.r.Body, BodyLimit))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		refuse(http.StatusRequestEntityTooLarge, devices.CodeTooLarge, "a request body may have "+strconv.Itoa(BodyLimit)+" bytes")
		return nil, false
	case err != nil:
		refuse(http.StatusBadRequest, devices.CodeBadRequest, "the body broke off: "+err.Error())
		return nil, false
	}
	return body, true
}

var errNoObject = errors.New("it must be a JSON object")

func badBody(err error) string { return "the body is not usable: " + err.Error() }

// members calls f for every member of the object in body. As in Express no
// body at all is an empty object, and so is an array, which has no members.
func members(body []byte, f func(key string, value []byte)) error {
	if len(bytes.Trim(body, " \t\r\n")) == 0 {
		return nil
	}
	walk := jsonspan.Object(body)
	for walk.Next() {
		f(string(walk.Key()), walk.Value())
	}
	err := walk.Err()
	if errors.Is(err, jsonspan.ErrType) {
		if value, _ := jsonspan.Value(body); jsonspan.KindOf(value) == jsonspan.KindArray {
			return nil
		}
		return errNoObject
	}
	return err
}

// appendString appends text as JSON.stringify writes it: unlike Go's it leaves
// <, >, & and the line separators as they are. Invalid UTF-8 becomes U+FFFD.
func appendString(dst []byte, text string) []byte {
	const digits, short = "0123456789abcdef", "\b\t\n\f\r"
	dst = append(dst, '"')
	for _, c := range []byte(strings.ToValidUTF8(text, "\ufffd")) {
		switch i := strings.IndexByte(short, c); {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c >= 0x20:
			dst = append(dst, c)
		case i >= 0:
			dst = append(dst, '\\', "btnfr"[i])
		default:
			dst = append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		}
	}
	return append(dst, '"')
}
