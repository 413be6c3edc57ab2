package restapi

import (
	"encoding/base64"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
)

// stamp is a time as the API writes it: RFC 3339 with milliseconds, UTC; null
// for the zero time.
type stamp time.Time

// MarshalJSON implements json.Marshaler.
func (t stamp) MarshalJSON() ([]byte, error) {
	return t.append(make([]byte, 0, len(`"2006-01-02T15:04:05.000Z"`))), nil
}

func (t stamp) append(dst []byte) []byte {
	if time.Time(t).IsZero() {
		return append(dst, "null"...)
	}
	at := time.Time(t).UTC()
	dst = at.AppendFormat(append(dst, '"'), time.RFC3339) // several times as fast as a layout with a fraction
	ms := at.Nanosecond() / 1e6
	return append(dst[:len(dst)-1], '.', byte('0'+ms/100), byte('0'+ms/10%10), byte('0'+ms%10), 'Z', '"')
}

// Schema implements huma.SchemaProvider.
func (stamp) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Format: "date-time", Nullable: true}
}

// Page are the parameters of a list.
type Page struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Most items of the page."`
	Cursor string `query:"cursor" doc:"next_cursor of the page before."`
}

// list is one page.
type list[T any] struct {
	Items      []T    `json:"items" nullable:"false"`
	NextCursor string `json:"next_cursor" doc:"Ask with it for the next page; empty on the last one."`
}

// newCursor hides the place a page ended at.
func newCursor(place string) string { return base64.RawURLEncoding.EncodeToString([]byte(place)) }

// parseCursor is the place again; empty for the first page.
func parseCursor(cursor string) (place string, err error) {
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil {
		return "", errCursor
	}
	return string(b), nil
}

var errCursor = badRequest(devices.ErrCursor.Error())

// more tells whether to offer another page. The largest page may be all that
// the database hands out at once, so when it is full another one may follow.
func hasMore(items, limit int, more bool) bool { return more || items == MaxLimit && limit == MaxLimit }

func parseDevice(text string) (devices.ID, error) {
	id, err := devices.ParseID(text)
	if err != nil {
		return "", badRequest(err.Error())
	}
	return id, nil
}

// historyPlace names an entry of a device's history.
func historyPlace(e devices.HistoryEntry) string {
	return strconv.FormatInt(int64(e.Epoch), 10) + "." + strconv.FormatInt(e.Seq, 10)
}

func parseHistoryPlace(place string) (devices.Epoch, int64, error) {
	if place == "" {
		return 0, 0, nil
	}
	first, second, _ := strings.Cut(place, ".")
	epoch, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		return 0, 0, errCursor
	}
	seq, err := strconv.ParseInt(second, 10, 64)
	if err != nil {
		return 0, 0, errCursor
	}
	return devices.Epoch(epoch), seq, nil
}

// parseTimeout reads a Go duration; absent text means the given default.
func parseTimeout(text string, absent time.Duration) (time.Duration, error) {
	if text == "" {
		return absent, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 || d > dispatch.MaxTimeout {
		return 0, badRequest(`timeout must be a duration above zero and at most ` + dispatch.MaxTimeout.String() + `, such as "10s"`)
	}
	return d, nil
}
