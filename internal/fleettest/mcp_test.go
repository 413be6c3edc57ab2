package fleettest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/api"
)

// withToken adds the bearer token to every request of an MCP client.
type withToken struct{ token string }

func (t withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+t.token)
	return http.DefaultTransport.RoundTrip(r)
}

func (n *Node) mcpTransport(path, token string) mcp.Transport {
	client := &http.Client{Transport: withToken{token}}
	if path == "/sse" {
		return &mcp.SSEClientTransport{Endpoint: n.Info.API + path, HTTPClient: client}
	}
	return &mcp.StreamableClientTransport{Endpoint: n.Info.API + path, HTTPClient: client}
}

// eras are the ways in which hosts speak.
var eras = []struct{ name, version string }{{"legacy", "2025-06-18"}, {"last with sessions", "2025-11-25"}, {"modern", "2026-07-28"}}

func (n *Node) connectMCP(t testing.TB, path, version string, opt *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	return n.connectMCPAs(t, n.Token(t), path, version, opt)
}

// connectMCPAs connects with this token.
func (n *Node) connectMCPAs(t testing.TB, token, path, version string, opt *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, opt)
	session, err := client.Connect(t.Context(), n.mcpTransport(path, token), &mcp.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		t.Fatalf("%s %s: %v", path, version, err)
	}
	t.Cleanup(func() { _ = session.Close() })
	return session
}

// callMCP calls a tool and returns its structured answer.
func callMCP(t testing.TB, s *mcp.ClientSession, name string, args any, into any) *mcp.CallToolResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r, err := s.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return &mcp.CallToolResult{}
	}
	if into != nil {
		body, err := json.Marshal(r.StructuredContent)
		if err == nil {
			err = json.Unmarshal(body, into)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	return r
}

func textOf(r *mcp.CallToolResult) string {
	for _, c := range r.Content {
		if text, ok := c.(*mcp.TextContent); ok {
			return text.Text
		}
	}
	return ""
}

// withTool returns a device that has the tool.
func withTool(t testing.TB, node *Node, tool string) api.Device {
	t.Helper()
	for _, d := range node.List(t) {
		tools, err := node.Tools(t.Context(), d.ID, true)
		if err == nil && strings.Contains(fmt.Sprintf("%s", tools.Items), `"`+tool+`"`) {
			return d
		}
	}
	t.Fatalf("no device has %s", tool)
	return api.Device{}
}

// A host finds devices, reads and calls their tools, sees a photo, and confirms with its
// person before a device restarts. Package mcpserver tests all revisions, and TestMCPOverPipes those of eras.
func TestMCPHosts(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--transport", "websocket", "--devices", "6", "--profile", "fw-2.4,fw-2.1,robot", "--seed", "3", "--wake", "1s", "--time-scale", "0.1")
	node.AwaitReady(t, 6)
	camera := withTool(t, node, "self.camera.take_photo")
	node.AwaitStored(t)
	asked := 0
	s := node.connectMCP(t, "/mcp", eras[len(eras)-1].version, &mcp.ClientOptions{ElicitationHandler: func(_ context.Context, r *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
		asked++
		if !strings.Contains(r.Params.Message, "self.reboot") {
			t.Errorf("asked %q", r.Params.Message)
		}
		return &mcp.ElicitResult{Action: "accept", Content: map[string]any{}}, nil
	}})
	tools, err := s.ListTools(t.Context(), nil)
	if err != nil || len(tools.Tools) != 13 {
		t.Fatalf("%+v, %v", tools, err)
	}
	var found struct {
		Devices []struct{ ID, State string }
		Next    string `json:"next_cursor"`
	}
	callMCP(t, s, "find_devices", map[string]any{"state": "online", "limit": 4}, &found)
	if len(found.Devices) != 4 || found.Next == "" {
		t.Errorf("found %+v", found)
	}
	callMCP(t, s, "find_devices", map[string]any{"state": "online", "limit": 4, "cursor": found.Next}, &found)
	if len(found.Devices) != 2 {
		t.Errorf("second page: %+v", found)
	}
	var described struct {
		Tools []struct {
			Name        string
			InputSchema json.RawMessage `json:"input_schema"`
		}
	}
	callMCP(t, s, "describe_device", map[string]any{"device": camera.ID}, &described)
	if len(described.Tools) < 4 || len(described.Tools[0].InputSchema) == 0 {
		t.Errorf("described %+v", described)
	}
	var search struct {
		Tools []struct {
			Name  string
			Count int `json:"device_count"`
		}
	}
	callMCP(t, s, "search_device_tools", map[string]any{"query": "set_volume"}, &search)
	sum := 0
	for _, tool := range search.Tools {
		sum += tool.Count
	}
	if sum != 6 {
		t.Errorf("search: %+v", search)
	}
	var called struct {
		Text    []string `json:"said_by_device"`
		IsError bool     `json:"is_error"`
		Outcome string
	}
	r := callMCP(t, s, "call_device_tool", map[string]any{"device": camera.ID, "tool": "audio_speaker_set_volume", "arguments": map[string]any{"volume": 30}}, &called)
	if r.IsError || called.IsError || len(called.Text) != 1 || textOf(r) == "" {
		t.Errorf("call: %+v %+v", r, called)
	}
	r = callMCP(t, s, "call_device_tool", map[string]any{"device": camera.ID, "tool": volume, "arguments": map[string]any{"volume": 300}}, nil)
	if !r.IsError || !strings.Contains(textOf(r), "invalid_arguments") {
		t.Errorf("wrong argument: %s", textOf(r))
	}
	r = callMCP(t, s, "call_device_tool", map[string]any{"device": camera.ID, "tool": "self.camera.take_photo", "arguments": map[string]any{"question": "what?"}}, &called)
	checkPhoto(t, node, r, strings.Join(called.Text, ""))
	var many struct{ OK, Failed int }
	callMCP(t, s, "call_many", map[string]any{"devices": ids(node.List(t)), "tool": "self.get_device_status"}, &many)
	if many.OK != 6 || many.Failed != 0 {
		t.Errorf("many: %+v", many)
	}
	r = callMCP(t, s, "call_device_tool", map[string]any{"device": camera.ID, "tool": "self.reboot"}, &called)
	if r.IsError || called.Outcome != "restarting" || asked != 1 {
		t.Errorf("reboot: %s, asked %d times", textOf(r), asked)
	}
	var waited struct{ Reached bool }
	callMCP(t, s, "wait_for_device", map[string]any{"device": camera.ID, "until": "ready", "timeout_seconds": 25}, &waited)
	if !waited.Reached {
		t.Error("the device did not come back")
	}
	var events struct {
		Events []struct{ Type, Device string }
	}
	callMCP(t, s, "list_recent_events", map[string]any{"device": camera.ID}, &events)
	if !slices.ContainsFunc(events.Events, func(e struct{ Type, Device string }) bool { return e.Type == "photo" }) {
		t.Errorf("events: %+v", events)
	}
	prompt, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "diagnose_device", Arguments: map[string]string{"device": camera.ID}})
	if err != nil || len(prompt.Messages) != 2 {
		t.Errorf("prompt: %+v, %v", prompt, err)
	}
}

func ids(list []api.Device) (ids []string) {
	for _, d := range list {
		ids = append(ids, d.ID)
	}
	return ids
}

// checkPhoto reports whether a result has the photo that its text names.
func checkPhoto(t testing.TB, node *Node, r *mcp.CallToolResult, text string) {
	t.Helper()
	var answer struct{ Photo string }
	if err := json.Unmarshal([]byte(text), &answer); err != nil || answer.Photo == "" {
		t.Errorf("the photo's text is %q", text)
		return
	}
	var stored bytes.Buffer
	if _, err := node.Photo(t.Context(), answer.Photo, &stored); err != nil {
		t.Error(err)
	}
	for _, c := range r.Content {
		if image, ok := c.(*mcp.ImageContent); ok {
			if image.MIMEType != "image/jpeg" || !bytes.Equal(image.Data, stored.Bytes()) || stored.Len() == 0 {
				t.Errorf("a picture of %d bytes, stored are %d", len(image.Data), stored.Len())
			}
			return
		}
	}
	t.Errorf("no picture in %d items", len(r.Content))
}

// Hosts that start a command speak through it, whatever revision, and go on
// when the node of the session was restarted.
func TestMCPOverPipes(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--transport", "websocket", "--devices", "2", "--profile", "fw-2.4", "--seed", "5", "--wake", "1s")
	node.AwaitReady(t, 2)
	device := node.List(t)[0].ID
	connect := func(version string, args ...string) *mcp.ClientSession {
		command := exec.Command(node.programs.Fleetd, append([]string{"mcp", "--data-dir", node.Dir}, args...)...)
		client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil)
		s, err := client.Connect(t.Context(), &mcp.CommandTransport{Command: command}, &mcp.ClientSessionOptions{ProtocolVersion: version})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	for _, era := range eras {
		s := connect(era.version)
		var called struct {
			Text []string `json:"said_by_device"`
		}
		if r := callMCP(t, s, "call_device_tool", map[string]any{"device": device, "tool": "self.camera.take_photo", "arguments": map[string]any{"question": "what?"}}, &called); !r.IsError {
			checkPhoto(t, node, r, strings.Join(called.Text, ""))
		}
		if r := callMCP(t, s, "call_device_tool", map[string]any{"device": device, "tool": volume, "arguments": map[string]any{"volume": 5}}, nil); r.IsError {
			t.Errorf("%s: %s", era.name, textOf(r))
		}
		own := connect(era.version, "--device", device)
		if r := callMCP(t, own, "audio_speaker_set_volume", map[string]any{"volume": 6}, nil); r.IsError {
			t.Errorf("%s: %s", era.name, textOf(r))
		}
	}
	legacy := connect("2025-06-18")
	node.Stop(t)
	node.Run(t)
	node.AwaitReady(t, 2)
	if r := callMCP(t, legacy, "find_devices", map[string]any{}, nil); r.IsError {
		t.Errorf("after a restart of the node: %s", textOf(r))
	}
	old := node.connectMCP(t, "/sse", "2024-11-05", nil)
	if r := callMCP(t, old, "find_devices", map[string]any{}, nil); r.IsError {
		t.Errorf("over the old transport: %s", textOf(r))
	}
	if n := node.Metric(t, "fleetd_mcp_sessions"); n < 2 {
		t.Errorf("%v sessions are counted", n)
	}
}
