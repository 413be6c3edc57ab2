package apiclient

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"fleetd/internal/api"
)

// CallRequest is one tool call.
type CallRequest struct {
	// Arguments is a JSON object; nil means none.
	Arguments json.RawMessage
	// Timeout bounds the call, waiting included; 0 leaves it to the server.
	Timeout time.Duration
	// Confirmation is that of an earlier refusal of the same call.
	Confirmation string
}

// CallResult is what a tool answered.
type CallResult struct {
	api.ToolResult
	Content []Content `json:"content"` // in place of that of ToolResult
	// Raw is the answer as received.
	Raw json.RawMessage `json:"-"`
}

// Content is one content item of MCP.
type Content struct {
	// Type is "text", "image" or another of MCP's types.
	Type string `json:"type"`
	Text string `json:"text"`
	// Data is base64, MIMEType its type, as MCP has it.
	Data     string `json:"data"`
	MIMEType string `json:"mimeType"`
	// Image is the firmware's own form: the JSON text of an object with mimeType and data (main/mcp_server.h:272 of
	// xiaozhi-esp32 v2.4.2).
	Image string `json:"image"`
	// Raw is the item as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the item as received; members of unexpected types leave their fields empty.
func (c *Content) UnmarshalJSON(data []byte) error {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(data, &members); err != nil {
		return err
	}
	*c = Content{Raw: append(json.RawMessage(nil), data...)}
	for name, field := range map[string]*string{
		"type": &c.Type, "text": &c.Text, "data": &c.Data, "mimeType": &c.MIMEType, "image": &c.Image,
	} {
		// The item is the device's; Raw still shows what does not fit.
		_ = json.Unmarshal(members[name], field)
	}
	return nil
}

// ImageBytes decodes an image item in either form.
func (c Content) ImageBytes() (data []byte, mimeType string, err error) {
	encoded, mimeType := c.Data, c.MIMEType
	if encoded == "" && c.Image != "" {
		var inner struct {
			MIMEType string `json:"mimeType"`
			Data     string `json:"data"`
		}
		if err := json.Unmarshal([]byte(c.Image), &inner); err != nil {
			return nil, "", fmt.Errorf("read the image the device sent: %w", err)
		}
		encoded, mimeType = inner.Data, inner.MIMEType
	}
	data, err = base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, "", fmt.Errorf("read the image the device sent: %w", err)
	}
	return data, mimeType, nil
}

// Call calls a tool. A tool that fails on the device is a result with IsError; everything else that goes wrong is an
// error, a [*Problem] if the server answered with one.
func (c *Client) Call(ctx context.Context, device, tool string, call CallRequest) (CallResult, error) {
	result, _, err := c.CallLater(ctx, device, tool, call, 0, "")
	return result, err
}

// CallLater calls a tool, or, if the device is not connected, queues the call for at most later. job is then
// the id of the job, and the result is empty.
func (c *Client) CallLater(ctx context.Context, device, tool string, call CallRequest, later time.Duration, key string) (result CallResult, job string, err error) {
	body := struct {
		Arguments json.RawMessage `json:"arguments,omitempty"`
		Timeout   string          `json:"timeout,omitempty"`

		Confirmation string `json:"confirmation,omitempty"`
		Later        string `json:"later,omitempty"`
	}{call.Arguments, durationText(call.Timeout), call.Confirmation, durationText(later)}
	answer, err := Send[Answer[struct {
		CallResult
		api.QueuedCall
	}]](ctx, c, Request{Method: http.MethodPost, Path: []string{"devices", device, "tools", tool, "call"}, Header: IdempotencyKey(key),
		Body: body, Timeout: cmp.Or(call.Timeout, LongestCall) + answerSlack})
	result, job = answer.Value.CallResult, answer.Value.Job
	if result.Raw = answer.Raw; err != nil || job != "" {
		return CallResult{}, job, err
	}
	return result, "", nil
}

func durationText(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}
