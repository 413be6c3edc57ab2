package restapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// TestClient is the command line's client against this API: it was written
// from the same promise, and the two share no types.
func TestClient(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	f.nodes = []devices.Node{{Name: "n-test"}}
	f.photos.photos = []devices.Photo{{ID: "p1", Device: robot, Bytes: 2}}
	f.photos.jpeg = []byte{1, 2}
	c, err := apiclient.New(f.url, f.token)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	id := string(robot)
	list, err := apiclient.Collect(c.Devices(ctx, apiclient.Query{"state": "online", "q": "aa"}))
	if err != nil || len(list) != 1 || list[0].ID != id || list[0].ConnectedAt.IsZero() || list[0].MCP.Tools != 2 {
		t.Errorf("%+v, %v", list, err)
	}
	name := "arm"
	labels := map[string]*string{"room": new("hall")}
	transport := "mqtt"
	if patched, err := c.Patch(ctx, id, api.DeviceEdit{Name: &name, Labels: labels, TransportWanted: &transport}, 0); err != nil || patched.Applies != "next boot" {
		t.Errorf("%+v, %v", patched, err)
	}
	if d, err := c.Device(ctx, id); err != nil || d.Name != "arm" || d.Labels["room"] != "hall" {
		t.Errorf("%+v, %v", d, err)
	}
	tools, err := c.Tools(ctx, id, true)
	if err != nil || tools.State != "ready" || len(tools.Items) != 2 || string(tools.Items[0]) != devicetest.Volume {
		t.Errorf("%+v, %v", tools, err)
	}
	if again, err := apiclient.Send[api.ToolList](ctx, c, apiclient.Request{Method: "POST", Path: []string{"devices", id, "tools", "refresh"}}); err != nil || again.Catalog != tools.Catalog {
		t.Errorf("%+v, %v", again, err)
	}
	if stored, err := apiclient.Get[api.StoredCatalog](ctx, c, nil, "catalogs", tools.Catalog); err != nil || len(stored.Items) != 2 {
		t.Errorf("%+v, %v", stored, err)
	}
	if history, err := apiclient.Collect(apiclient.List[api.HistoryEntry](ctx, c, nil, "devices", id, "catalogs")); err != nil || len(history) != 1 {
		t.Errorf("%+v, %v", history, err)
	}
	const tool = "self.audio_speaker.set_volume"
	call, err := c.Call(ctx, id, tool, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":5}`), Timeout: time.Second})
	if err != nil || len(call.Content) != 1 || call.Content[0].Text != "true" || call.Node != "n-test" {
		t.Errorf("%+v, %v", call, err)
	}
	_, err = c.Call(ctx, id, tool, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":"loud"}`)})
	problem := (*apiclient.Problem)(nil)
	if !errors.As(err, &problem) || problem.Code != "invalid_arguments" || len(problem.Errors) != 1 || problem.Errors[0].Pointer != "/volume" {
		t.Errorf("%v", err)
	}
	if rpc, err := apiclient.Send[api.RPCResult](ctx, c, apiclient.Request{Method: "POST", Path: []string{"devices", id, "mcp"}, Body: api.RPC{Method: "tools/list"}}); err != nil || rpc.Result == nil {
		t.Errorf("%+v, %v", rpc, err)
	}
	if photos, err := apiclient.Collect(apiclient.List[api.Photo](ctx, c, apiclient.Query{"device": id}, "photos")); err != nil || len(photos) != 1 {
		t.Errorf("%+v, %v", photos, err)
	}
	var jpeg bytes.Buffer
	if _, err := c.Photo(ctx, "p1", &jpeg); err != nil || !bytes.Equal(jpeg.Bytes(), f.photos.jpeg) {
		t.Errorf("%v, %v", jpeg.Bytes(), err)
	}
	if err := c.Do(ctx, "DELETE", nil, "photos", "p1"); err != nil {
		t.Error(err)
	}
	if nodes, err := apiclient.Collect(apiclient.List[api.Node](ctx, c, nil, "nodes")); err != nil || len(nodes) != 1 {
		t.Errorf("%+v, %v", nodes, err)
	}
	if self, err := apiclient.Get[api.Self](ctx, c, nil, "self"); err != nil || self.Key != "admin" || !self.Admin || len(self.Scopes) == 0 || !self.Devices.IsZero() || !self.Expires.IsZero() {
		t.Errorf("%+v, %v", self, err)
	}
	if err := c.Do(ctx, "PUT", api.LogLevel{Level: "debug"}, "log-level"); err != nil {
		t.Error(err)
	}
	if level, err := apiclient.Get[api.LogLevel](ctx, c, nil, "log-level"); err != nil || level.Level != "debug" {
		t.Errorf("%+v, %v", level, err)
	}
	if d, err := c.Diagnose(ctx, id); err != nil || d.Status != 200 || d.Device != id || len(d.Findings) != 1 || d.ServerTime.IsZero() {
		t.Errorf("%+v, %v", d, err)
	}
	f.events.queue = make(chan devices.StreamEvent, 1)
	f.events.queue <- devices.StreamEvent{ID: devices.EventPosition{42}, Kind: devices.EventOnline, Data: []byte(`{}`)}
	for event, err := range c.Events(ctx, apiclient.EventOptions{Device: id, Type: "online", After: "41"}) {
		if err != nil || event.ID != "42" || event.Type != "online" {
			t.Errorf("%+v, %v", event, err)
		}
		break
	}
	for _, do := range []func() error{func() error { return c.Approve(ctx, id, "") }, func() error { _, err := c.Revoke(ctx, id); return err }, func() error { return c.Forget(ctx, id) }} {
		if err := do(); err != nil {
			t.Error(err)
		}
	}
}
