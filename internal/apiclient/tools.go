package apiclient

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"time"

	"fleetd/internal/api"
)

// ToolList is a device's tools, or a stored catalog.
type ToolList struct {
	api.ToolList
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *ToolList) UnmarshalJSON(data []byte) error { return withRaw(data, &x.ToolList, &x.Raw) }

// Tools returns the tools of a device; user adds those that the device marks as being for its user only.
func (c *Client) Tools(ctx context.Context, device string, user bool) (ToolList, error) {
	query := make(url.Values)
	if user {
		query.Set("user", "true")
	}
	return c.toolList(ctx, requestTimeout, http.MethodGet, pathOf("devices", device, "tools"), query)
}

// Refresh makes the server list the tools of a connected device again, which takes as long as the device does.
func (c *Client) Refresh(ctx context.Context, device string) (ToolList, error) {
	return c.toolList(ctx, longestCall+answerSlack, http.MethodPost, pathOf("devices", device, "tools", "refresh"), nil)
}

// Catalog returns a stored tool list by its SHA-256.
func (c *Client) Catalog(ctx context.Context, hash string) (ToolList, error) {
	return c.toolList(ctx, requestTimeout, http.MethodGet, pathOf("catalogs", hash), nil)
}

func (c *Client) toolList(ctx context.Context, timeout time.Duration, method, path string, query url.Values) (ToolList, error) {
	var answer ToolList
	err := c.into(ctx, timeout, method, path, query, nil, &answer)
	return answer, err
}

// DeviceCatalogs returns which catalogs a device had, under which firmware and when, each as the server sends it.
func (c *Client) DeviceCatalogs(ctx context.Context, device string) iter.Seq2[json.RawMessage, error] {
	return list[json.RawMessage](ctx, c, pathOf("devices", device, "catalogs"), nil)
}

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
	Content []Content `json:"content"`
	// IsError: the tool failed on the device; Content has its text.
	IsError bool `json:"isError"`
	// DurationMS is how long the call took, in milliseconds.
	DurationMS float64 `json:"duration_ms"`
	// Node is the node that held the device.
	Node string `json:"node"`
	// Call is the id of the call, in the audit and in logs.
	Call string `json:"call"`
	// Outcome is "restarting" if the tool restarts the device and therefore never answers.
	Outcome string `json:"outcome"`
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
	content, err := c.call(ctx, device, tool, call, 0, nil)
	if err != nil {
		return CallResult{}, err
	}
	answer := CallResult{Raw: content}
	return answer, c.decode(content, &answer)
}

func (c *Client) call(ctx context.Context, device, tool string, call CallRequest, later time.Duration, header http.Header) ([]byte, error) {
	body := struct {
		Arguments json.RawMessage `json:"arguments,omitempty"`
		Timeout   string          `json:"timeout,omitempty"`

		Confirmation string `json:"confirmation,omitempty"`
		Later        string `json:"later,omitempty"`
	}{call.Arguments, durationText(call.Timeout), call.Confirmation, durationText(later)}
	ctx, cancel := context.WithTimeout(ctx, callTimeout(call.Timeout))
	defer cancel()
	resp, err := c.do(ctx, http.MethodPost, pathOf("devices", device, "tools", tool, "call"), nil, body, header)
	if err != nil {
		return nil, err
	}
	return c.readAll(resp)
}

// MCP sends a device any MCP request but initialize. Params is a JSON object or nil; timeout 0 leaves it to the server.
func (c *Client) MCP(ctx context.Context, device, method string, params json.RawMessage, timeout time.Duration) (api.RPCResult, error) {
	body := struct {
		Method  string          `json:"method"`
		Params  json.RawMessage `json:"params,omitempty"`
		Timeout string          `json:"timeout,omitempty"`
	}{method, params, durationText(timeout)}
	var answer api.RPCResult
	err := c.into(ctx, callTimeout(timeout), http.MethodPost, pathOf("devices", device, "mcp"), nil, body, &answer)
	return answer, err
}

func durationText(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

// callTimeout is how long the client waits for the answer to a call.
func callTimeout(call time.Duration) time.Duration {
	if call == 0 {
		call = longestCall
	}
	return call + answerSlack
}
