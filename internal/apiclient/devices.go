package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"strconv"
	"time"

	"fleetd/internal/api"
)

// Devices returns the devices that a query selects.
func (c *Client) Devices(ctx context.Context, query Query) iter.Seq2[api.Device, error] {
	return List[api.Device](ctx, c, query, "devices")
}

// Device returns one device.
func (c *Client) Device(ctx context.Context, id string) (api.Device, error) {
	return Get[api.Device](ctx, c, nil, "devices", id)
}

// Patch changes a device; ifMatch refuses the change with status 412 unless the device is at this revision, and 0 does not.
func (c *Client) Patch(ctx context.Context, id string, edit api.DeviceEdit, ifMatch int64) (api.EditedDevice, error) {
	header := make(http.Header)
	if ifMatch != 0 {
		header.Set("If-Match", `"`+strconv.FormatInt(ifMatch, 10)+`"`)
	}
	return Send[api.EditedDevice](ctx, c, Request{Method: http.MethodPatch, Path: []string{"devices", id}, Body: edit, Header: header})
}

// PatchSelected changes all devices of a selection, which must not be empty.
func (c *Client) PatchSelected(ctx context.Context, selection string, edit api.SelectionEdit) (api.SelectionEdited, error) {
	return Send[api.SelectionEdited](ctx, c, Request{Method: http.MethodPatch, Path: []string{"devices"}, Query: Query{"select": selection}, Body: edit, Timeout: BulkTimeout})
}

// Forget removes a device and invalidates its credentials.
func (c *Client) Forget(ctx context.Context, id string) error {
	return c.Do(ctx, http.MethodDelete, nil, "devices", id)
}

// Approve admits a waiting device, or one of the clients that wait as this device. client may be empty unless another
// one is admitted or several wait.
func (c *Client) Approve(ctx context.Context, id, client string) error {
	return c.Do(ctx, http.MethodPost, api.Approval{Client: client}, "devices", id, "approve")
}

// Revoke raises a device's credentials to a new generation: the old ones are no longer valid, and the device waits for
// approval from its next OTA check on.
func (c *Client) Revoke(ctx context.Context, id string) (api.Revocation, error) {
	return c.revoke(ctx, http.MethodPost, "devices", id, "revoke")
}

// RevokeKey ends a key, given by id or name.
func (c *Client) RevokeKey(ctx context.Context, key string) (api.Revocation, error) {
	return c.revoke(ctx, http.MethodDelete, "keys", key)
}

// revoke sends a request that has an answer only while the database is away.
func (c *Client) revoke(ctx context.Context, method string, path ...string) (api.Revocation, error) {
	answer := api.Revocation{Recorded: true}
	_, err := c.send(ctx, Request{Method: method, Path: path}, &answer)
	return answer, err
}

// CreateKey makes a key; its Token is shown this once.
func (c *Client) CreateKey(ctx context.Context, key api.NewKey) (api.CreatedKey, error) {
	return Send[api.CreatedKey](ctx, c, Request{Method: http.MethodPost, Path: []string{"keys"}, Body: key})
}

// SetPolicy replaces the rules, if the version in force still is base, and returns them as the server sends them.
func (c *Client) SetPolicy(ctx context.Context, policy json.RawMessage, base int64) (json.RawMessage, error) {
	return Send[json.RawMessage](ctx, c, Request{Method: http.MethodPut, Path: []string{"policy"}, Query: Query{"base_version": strconv.FormatInt(base, 10)}, Body: policy})
}

// Tools returns the tools of a device; user adds those that the device marks as being for its user only.
func (c *Client) Tools(ctx context.Context, device string, user bool) (api.ToolList, error) {
	return Get[api.ToolList](ctx, c, Query{"user": ifTrue(user)}, "devices", device, "tools")
}

// ifTrue returns "true" or nothing.
func ifTrue(is bool) string {
	if is {
		return "true"
	}
	return ""
}

// ExplainCall returns why a call ended as it did.
func (c *Client) ExplainCall(ctx context.Context, call string) (api.Why, error) {
	return Get[api.Why](ctx, c, nil, "calls", call, "explain")
}

// StartTrace starts a trace of a device, or replaces one.
func (c *Client) StartTrace(ctx context.Context, device string, trace api.NewTrace) (api.Trace, error) {
	return Send[api.Trace](ctx, c, Request{Method: http.MethodPost, Path: []string{"devices", device, "trace"}, Body: trace})
}

// EndTrace ends the trace of a device.
func (c *Client) EndTrace(ctx context.Context, device string) error {
	return c.Do(ctx, http.MethodDelete, nil, "devices", device, "trace")
}

// Photo copies the JPEG of a photo to w and returns how many bytes it has.
func (c *Client) Photo(ctx context.Context, id string, w io.Writer) (int64, error) {
	return c.Download(ctx, w, nil, "photos", id)
}

// IdempotencyKey returns the header with which a request that was made before is not made again; an empty key has none.
func IdempotencyKey(key string) http.Header {
	if key == "" {
		return nil
	}
	return http.Header{"Idempotency-Key": {key}}
}

// CreateWebhook creates a webhook.
func (c *Client) CreateWebhook(ctx context.Context, webhook api.NewWebhook) (api.CreatedWebhook, error) {
	return Send[api.CreatedWebhook](ctx, c, Request{Method: http.MethodPost, Path: []string{"webhooks"}, Body: webhook})
}

// JobVerb is the request that applies a verb to a job.
func JobVerb(id, verb, reason string, outcomes []string) Request {
	return Request{Method: http.MethodPost, Path: []string{"jobs", id, verb}, Body: struct {
		Reason  string   `json:"reason,omitempty"`
		Outcome []string `json:"outcome,omitempty"`
	}{reason, outcomes}}
}

// Job returns a job.
func (c *Client) Job(ctx context.Context, id string) (api.Job, error) {
	return Get[api.Job](ctx, c, nil, "jobs", id)
}

// Diagnosis is what a device gets at its OTA check.
type Diagnosis struct {
	api.Diagnosis
	// ServerTime is the server's clock when it answered, in whole seconds; zero if the answer does not have it.
	ServerTime time.Time
	// Raw is the answer as received.
	Raw json.RawMessage
}

// Diagnose returns what a device gets at its OTA check. An empty id stands for a device that does not exist.
func (c *Client) Diagnose(ctx context.Context, device string) (Diagnosis, error) {
	var answer Answer[api.Diagnosis]
	header, err := c.send(ctx, Request{Query: Query{"device": device}, Path: []string{"diagnosis"}}, &answer)
	at, _ := http.ParseTime(header.Get("Date")) // zero without one
	return Diagnosis{answer.Value, at, answer.Raw}, err
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

// AddFirmware sends a firmware file as it reads it. fresh reports whether something of it was added.
func (c *Client) AddFirmware(ctx context.Context, file io.Reader, size int64, query Query) (added Answer[api.AddedFirmware], fresh bool, err error) {
	resp, err := c.do(ctx, http.MethodPost, pathOf("firmware"), query, upload{file, "application/octet-stream", size}, nil)
	if err != nil {
		return added, false, err
	}
	content, err := c.readAll(resp)
	if err == nil {
		err = c.decode(content, &added)
	}
	return added, resp.StatusCode == http.StatusCreated, err
}

// ImportDevices sends a file of devices as it reads it. A file that is refused for its faults is a report with them, and
// the [*Problem].
func (c *Client) ImportDevices(ctx context.Context, file io.Reader, options ImportOptions) (report api.ImportReport, err error) {
	query := Query{"partial": ifTrue(options.Partial), "replace_client": ifTrue(options.ReplaceClient)}
	contentType := "text/csv"
	if options.Format == FormatNDJSON {
		contentType = "application/x-ndjson"
	}
	resp, err := c.do(ctx, http.MethodPost, pathOf("devices", "import"), query, upload{file, contentType, max(options.Size, -1)}, nil)
	if problem, ok := errors.AsType[*Problem](err); ok {
		report.Faults, report.Refused = problem.Faults, problem.Refused
	}
	if err != nil {
		return report, err
	}
	content, err := c.readAll(resp)
	if err != nil {
		return report, err
	}
	return report, c.decode(content, &report)
}
