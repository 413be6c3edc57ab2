package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"

	"fleetd/internal/api"
)

// FleetCounts are the numbers of devices by their values.
type FleetCounts struct {
	api.FleetCounts
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *FleetCounts) UnmarshalJSON(data []byte) error { return withRaw(data, &x.FleetCounts, &x.Raw) }

// Fleet counts the devices of a selection; an empty one counts all.
func (c *Client) Fleet(ctx context.Context, selection string) (FleetCounts, error) {
	query := make(url.Values)
	setIf(query, "select", selection)
	var answer FleetCounts
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("fleet"), query, nil, &answer)
	return answer, err
}

// PatchSelected changes all devices of a selection, which must not be empty.
func (c *Client) PatchSelected(ctx context.Context, selection string, patch api.SelectionEdit) (api.SelectionEdited, error) {
	var answer api.SelectionEdited
	err := c.into(ctx, bulkTimeout, http.MethodPatch, pathOf("devices"), url.Values{"select": {selection}}, patch, &answer)
	return answer, err
}

// Formats of devices in a file.
const (
	FormatCSV    = "csv"
	FormatNDJSON = "ndjson"
)

// ImportOptions say how devices are imported.
type ImportOptions struct {
	// Format is that of the file.
	Format string
	// Size is that of the file in bytes, negative if it is not known.
	Size int64
	// Partial imports the lines without a fault; without it a fault refuses the whole file.
	Partial bool
	// ReplaceClient lets a line change the client of a member and admit a revoked device again.
	ReplaceClient bool
}

// ImportDevices sends a file of devices as it reads it. A file that is refused for its faults is a report with them, and
// the [*Problem].
func (c *Client) ImportDevices(ctx context.Context, file io.Reader, options ImportOptions) (api.ImportReport, error) {
	query := make(url.Values)
	if options.Partial {
		query.Set("partial", "true")
	}
	if options.ReplaceClient {
		query.Set("replace_client", "true")
	}
	contentType := "text/csv"
	if options.Format == FormatNDJSON {
		contentType = "application/x-ndjson"
	}
	var report api.ImportReport
	resp, err := c.do(ctx, http.MethodPost, pathOf("devices", "import"), query, upload{file, contentType, max(options.Size, -1)}, nil)
	var problem *Problem
	switch {
	case errors.As(err, &problem):
		report.Faults, report.Refused = problem.lineFaults()
		return report, err
	case err != nil:
		return report, err
	}
	content, err := c.readAll(resp)
	if err != nil {
		return report, err
	}
	return report, c.decode(content, &report)
}

// lineFaults returns "faults" and "refused": the faults in a file, and how many rows have one.
func (p *Problem) lineFaults() (faults []api.LineFault, refused int64) {
	// Absent or of another shape: nothing to show; the detail remains.
	_ = json.Unmarshal(p.Extensions["faults"], &faults)
	_ = json.Unmarshal(p.Extensions["refused"], &refused)
	return faults, refused
}

// ExportDevices copies the devices of a selection, or all, to w, and returns how many bytes it wrote.
func (c *Client) ExportDevices(ctx context.Context, selection, format string, secrets bool, w io.Writer) (int64, error) {
	query := url.Values{"format": {format}}
	if secrets {
		query.Set("secrets", "true")
	}
	setIf(query, "select", selection)
	return c.download(ctx, pathOf("devices", "export"), query, w)
}

// Change is one decision about a device or the fleet.
type Change struct {
	api.Change
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Change) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Change, &x.Raw) }

// Changes returns the log of decisions: of one device, the newest first, or of all in order of revision if device is
// empty. since is a revision or a time (RFC 3339); the log begins after it. If it is empty, the log begins with the oldest change there is.
func (c *Client) Changes(ctx context.Context, device, since string) iter.Seq2[Change, error] {
	query := make(url.Values)
	setIf(query, "since", since)
	if device != "" {
		return list[Change](ctx, c, pathOf("devices", device, "changes"), query)
	}
	return list[Change](ctx, c, pathOf("changes"), query)
}
