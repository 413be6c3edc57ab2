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

// parseMoment is timespan.Moment for a parameter.
func parseMoment(name, text string, now time.Time) (time.Time, error) {
	at, err := timespan.Moment(name, text, now)
	if err != nil {
		return at, badRequest(err.Error())
	}
	return at, nil
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
