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

	"fleetd/internal/api"
)

// Photo is one stored picture without its bytes.
type Photo struct {
	api.Photo
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Photo) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Photo, &x.Raw) }

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
	api.Node
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Node) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Node, &x.Raw) }

// Nodes returns the nodes of the fleet in order of name.
func (c *Client) Nodes(ctx context.Context) iter.Seq2[Node, error] {
	return list[Node](ctx, c, pathOf("nodes"), nil)
}

// LogLevel returns the level of the node's log: "debug", "info", "warn" or "error".
func (c *Client) LogLevel(ctx context.Context) (string, error) {
	var answer api.LogLevel
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("log-level"), nil, nil, &answer)
	return answer.Level, err
}

// SetLogLevel changes the level of the node's log until it stops.
func (c *Client) SetLogLevel(ctx context.Context, level string) error {
	return c.into(ctx, requestTimeout, http.MethodPut, pathOf("log-level"), nil, api.LogLevel{Level: level}, nil)
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
	return answer, c.decode(content, &answer.Diagnosis)
}
