package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"time"
)

// FleetCounts say how many devices there are of each kind. A dimension has its most frequent values, and "other" for
// the rest.
type FleetCounts struct {
	Total int64 `json:"total"`
	// AsOf is when the devices were counted.
	AsOf          time.Time        `json:"as_of"`
	State         map[string]int64 `json:"state"`
	OfflineReason map[string]int64 `json:"offline_reason"`
	Transport     map[string]int64 `json:"transport"`
	Board         map[string]int64 `json:"board"`
	Firmware      map[string]int64 `json:"firmware"`
	Node          map[string]int64 `json:"node"`
	MCPState      map[string]int64 `json:"mcp_state"`
	// Raw is the answer as received.
	Raw json.RawMessage `json:"-"`
}

// Fleet counts the devices of a selection; an empty one counts all.
func (c *Client) Fleet(ctx context.Context, selection string) (FleetCounts, error) {
	query := make(url.Values)
	setIf(query, "select", selection)
	content, _, err := c.exchange(ctx, requestTimeout, http.MethodGet, pathOf("fleet"), query, nil)
	if err != nil {
		return FleetCounts{}, err
	}
	answer := FleetCounts{Raw: content}
	return answer, c.decode(content, &answer)
}

// SelectionPatch changes all devices of a selection.
type SelectionPatch struct {
	// Labels are merged into those of each device; nil removes a label.
	Labels map[string]*string `json:"labels,omitempty"`
	// Transport is what the devices are offered at their next boot.
	Transport *string `json:"transport,omitempty"`
}

// SelectionPatched says how many devices a patch was for, and how many it changed.
type SelectionPatched struct {
	Matched int64 `json:"matched"`
	Changed int64 `json:"changed"`
}

// PatchSelected changes all devices of a selection, which must not be empty.
func (c *Client) PatchSelected(ctx context.Context, selection string, patch SelectionPatch) (SelectionPatched, error) {
	var answer SelectionPatched
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

// LineFault is a fault in a file.
type LineFault struct {
	// Line and Column count from 1; Column is 0 if the fault is the line's.
	Line   int64  `json:"line"`
	Column int64  `json:"column"`
	Detail string `json:"detail"`
}

// ImportReport says what became of a file. Of a refused file it has the faults alone.
type ImportReport struct {
	// Rows is how many devices the file contains.
	Rows      int64 `json:"rows"`
	Created   int64 `json:"created"`
	Changed   int64 `json:"changed"`
	Unchanged int64 `json:"unchanged"`
	// Refused is how many rows have a fault, Faults the first of them.
	Refused int64       `json:"refused"`
	Faults  []LineFault `json:"faults"`
	// FirstClients is how many rows are members without a client: the first that comes is admitted.
	FirstClients int64 `json:"first_clients"`
}

// ImportDevices sends a file of devices as it reads it. A file that is refused for its faults is a report with them, and
// the [*Problem].
func (c *Client) ImportDevices(ctx context.Context, file io.Reader, options ImportOptions) (ImportReport, error) {
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
	var report ImportReport
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
func (p *Problem) lineFaults() (faults []LineFault, refused int64) {
	// Absent or of another shape: nothing to show; the detail remains.
	_ = json.Unmarshal(p.Extensions["faults"], &faults)
	_ = json.Unmarshal(p.Extensions["refused"], &refused)
	return faults, refused
}

// ExportDevices copies the devices of a selection, or all, to w, and returns how many bytes it wrote.
func (c *Client) ExportDevices(ctx context.Context, selection, format string, w io.Writer) (int64, error) {
	query := url.Values{"format": {format}}
	setIf(query, "select", selection)
	return c.download(ctx, pathOf("devices", "export"), query, w)
}

// Change is one decision about a device or the fleet.
type Change struct {
	Revision int64 `json:"revision"`
	// Device is empty for a decision about the fleet.
	Device string `json:"device"`
	// Aspect is what was decided, such as "name" or "label:room".
	Aspect string `json:"aspect"`
	// Value is JSON; null: removed.
	Value json.RawMessage `json:"value"`
	Who   string          `json:"who"`
	At    time.Time       `json:"at"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Change) UnmarshalJSON(data []byte) error {
	type plain Change
	return withRaw(data, (*plain)(x), &x.Raw)
}

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
