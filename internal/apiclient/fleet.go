package apiclient

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"
	"net/url"
	"time"
)

// Photo is one stored picture without its bytes.
type Photo struct {
	ID       string `json:"id"`
	Device   string `json:"device"`
	Question string `json:"question"`
	Bytes    int64  `json:"bytes"`
	SHA256   string `json:"sha256"`
	// Kind is "camera" or "snapshot".
	Kind    string    `json:"kind"`
	TakenAt time.Time `json:"taken_at"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (p *Photo) UnmarshalJSON(data []byte) error {
	type plain Photo
	return withRaw(data, (*plain)(p), &p.Raw)
}

// Photos returns the stored photos of a device, or of all devices if device is empty, newest first.
func (c *Client) Photos(ctx context.Context, device string) iter.Seq2[Photo, error] {
	query := make(url.Values)
	setIf(query, "device", device)
	return list[Photo](ctx, c, pathOf("photos"), query)
}

// Photo copies the JPEG of a photo to w and returns how many bytes it has.
func (c *Client) Photo(ctx context.Context, id string, w io.Writer) (int64, error) {
	return c.download(ctx, pathOf("photos", id), nil, w)
}

// DeletePhoto removes a photo.
func (c *Client) DeletePhoto(ctx context.Context, id string) error {
	return c.into(ctx, requestTimeout, http.MethodDelete, pathOf("photos", id), nil, nil, nil)
}

// Node is one node of the fleet.
type Node struct {
	Name    string    `json:"name"`
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	// Devices is how many are connected to it.
	Devices int64 `json:"devices"`
	// API is the base URL of its API.
	API string `json:"api"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (n *Node) UnmarshalJSON(data []byte) error {
	type plain Node
	return withRaw(data, (*plain)(n), &n.Raw)
}

// Nodes returns the nodes of the fleet in order of name.
func (c *Client) Nodes(ctx context.Context) iter.Seq2[Node, error] {
	return list[Node](ctx, c, pathOf("nodes"), nil)
}

// logLevel is the body of both log level calls.
type logLevel struct {
	Level string `json:"level"`
}

// LogLevel returns the level of the node's log: "debug", "info", "warn" or "error".
func (c *Client) LogLevel(ctx context.Context) (string, error) {
	var answer logLevel
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("log-level"), nil, nil, &answer)
	return answer.Level, err
}

// SetLogLevel changes the level of the node's log until it stops.
func (c *Client) SetLogLevel(ctx context.Context, level string) error {
	return c.into(ctx, requestTimeout, http.MethodPut, pathOf("log-level"), nil, logLevel{level}, nil)
}

// Diagnosis is the world as a device sees it.
type Diagnosis struct {
	// OTAURL is the URL to type into a device.
	OTAURL string `json:"ota_url"`
	// Device is the device the reply is for.
	Device string `json:"device"`
	// Status and Reply are the exact answer to its OTA check.
	Status int             `json:"status"`
	Reply  json.RawMessage `json:"reply"`
	// Findings are the settings that would strand a device, as far as the server can tell.
	Findings []Finding `json:"findings"`
	// ServerTime is the server's clock when it answered, in whole seconds; zero if it did not say.
	ServerTime time.Time `json:"-"`
	// Raw is the answer as received.
	Raw json.RawMessage `json:"-"`
}

// Finding is one thing wrong, or worth knowing, about a setting.
type Finding struct {
	// Severity is "error", "warning" or "info".
	Severity string `json:"severity"`
	// Setting is the flag it is about, such as "--public-host"; empty if it is about none.
	Setting string `json:"setting"`
	// Message is the sentence for people.
	Message string `json:"message"`
}

// Diagnose asks what a device would be told at its OTA check. An empty device takes one that does not exist.
func (c *Client) Diagnose(ctx context.Context, device string) (Diagnosis, error) {
	query := make(url.Values)
	setIf(query, "device", device)
	content, header, err := c.exchange(ctx, requestTimeout, http.MethodGet, pathOf("diagnosis"), query, nil)
	if err != nil {
		return Diagnosis{}, err
	}
	answer := Diagnosis{Raw: bytes.TrimSpace(content)}
	if date, err := http.ParseTime(header.Get("Date")); err == nil {
		answer.ServerTime = date
	}
	return answer, c.decode(content, &answer)
}
