package restapi

import (
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/timespan"
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

func parseDevice(text string) (devices.ID, error) {
	id, err := devices.ParseID(text)
	if err != nil {
		return "", badRequest(err.Error())
	}
	return id, nil
}

// parseMoment reads a time: RFC 3339, or a duration before now, such as 1h or 7d. name is the parameter. Empty text is the zero
// time.
func parseMoment(name, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	if d, err := timespan.Parse(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, badRequest(name + " must be a time such as 2026-03-01T12:00:00Z, or a duration before now such as 1h or 7d")
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
