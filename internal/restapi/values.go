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

// timeSchema describes an api.Time.
type timeSchema struct{}

// Schema implements huma.SchemaProvider.
func (timeSchema) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Format: "date-time", Nullable: true}
}

// amountSchema describes a number of tasks, or a share of them.
type amountSchema struct{}

// Schema implements huma.SchemaProvider.
func (amountSchema) Schema(huma.Registry) *huma.Schema {
	least := 1.0
	return &huma.Schema{OneOf: []*huma.Schema{{Type: huma.TypeInteger, Minimum: &least}, {Type: huma.TypeString, Pattern: `^[0-9.]+%$`}}, Examples: []any{"5%"}}
}

// Page are the parameters of a list.
type Page struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Most items of the page."`
	Cursor string `query:"cursor" doc:"next_cursor of the page before."`
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

// more reports whether to offer another page. The largest page may be all that
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
