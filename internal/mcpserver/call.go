package mcpserver

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
)

// Bounds of what a call gives back.
const (
	maxPhoto     = 4 << 20         // bytes, as the receiver of uploads allows
	clockSlack   = 5 * time.Second // between the node that called and the one that took the photo
	maxPhotoText = 16 << 10        // bytes of an answer that may name a photo
	maxShownArgs = 2000            // bytes of the arguments in a question to a person
)

// askConfirm names the question in a result that needs an answer.
const askConfirm = "confirm"

// failure is why a call has no result, as a host shows it.
type failure struct {
	Device  string          `json:"device,omitempty"`
	Tool    string          `json:"tool,omitempty"`
	Code    devices.Code    `json:"code"`
	Detail  string          `json:"detail"`
	Rule    string          `json:"rule,omitempty"`
	Sent    bool            `json:"sent,omitempty"`
	Outcome string          `json:"outcome,omitempty"`
	Faults  []devices.Fault `json:"errors,omitempty"`
	Call    string          `json:"call,omitempty"`
}

func (s *Server) failure(err error) failure {
	e := devices.AsError(err)
	if e.Code == devices.CodeInternal {
		s.log.Error("MCP request failed", "error", err, "call", e.Call)
		return failure{Code: e.Code, Detail: "internal error; the node's log says more", Sent: e.Sent, Outcome: e.Outcome, Call: e.Call}
	}
	f := failure{Code: e.Code, Detail: cleanText(e.Detail), Rule: e.Rule, Sent: e.Sent, Outcome: e.Outcome, Call: e.Call}
	for _, fault := range e.Faults { // they quote the device's schema
		f.Faults = append(f.Faults, devices.Fault{Pointer: cleanText(fault.Pointer), Detail: cleanText(fault.Detail)})
	}
	return f
}

// failed is the result of a tool that could not do its work: models read those
// and try again, where a protocol error stays with the host.
func (s *Server) failed(f failure) *mcp.CallToolResult {
	s.stats.Calls.Add(string(f.Code), 1)
	r := structured(struct {
		Error failure `json:"error"`
	}{f})
	r.IsError = true
	return r
}

func (s *Server) failedBy(err error) *mcp.CallToolResult { return s.failed(s.failure(err)) }

// note records that a caller was turned away before it came to a call, which
// the core records itself.
func (s *Server) note(by access.By, action string, id devices.ID, err error) {
	if e := devices.AsError(err); e.Code == devices.CodeForbidden || e.Code == devices.CodeUnauthorized {
		s.opt.Service.NoteRefusal(by, action, id, err)
	}
}

// structured is a result that is the same as JSON and as text.
func structured(v any) *mcp.CallToolResult {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil { // strings, numbers and checked JSON encode
		return &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: "the result cannot be written: " + err.Error()}}}
	}
	text := bytes.TrimSpace(b.Bytes())
	return &mcp.CallToolResult{StructuredContent: json.RawMessage(text), Content: []mcp.Content{&mcp.TextContent{Text: string(text)}}}
}

// run calls one tool of one device. The confirmation of a person is that of a
// question which the core asked before: it belongs to this caller, device, tool
// and arguments, and is good once.
func (s *Server) run(ctx context.Context, by access.By, c devices.ToolCall, timeout time.Duration) (devices.ToolResult, []mcp.Content, error) {
	if timeout == 0 {
		timeout = dispatch.TimeoutFor(c.Tool)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c.By = by
	begun := time.Now()
	result, err := s.opt.Service.CallTool(ctx, c)
	if err != nil {
		return result, nil, err
	}
	return result, s.photos(ctx, c.Device, begun, contents(result.Content)), nil
}

// asking runs a call that a person may have to confirm. question is set if the
// host is to ask first.
func (s *Server) asking(ctx context.Context, req *mcp.CallToolRequest, c devices.ToolCall, timeout time.Duration) (result devices.ToolResult, content []mcp.Content, question *mcp.CallToolResult, err error) {
	answered := false
	if answer, ok := req.Params.InputResponses[askConfirm]; ok {
		yes, isAnswer := answer.(*mcp.ElicitResult)
		if !isAnswer || yes.Action != "accept" {
			c.Confirmation = dispatch.Declined(req.Params.RequestState)
			_, _, err := s.run(ctx, visitOf(ctx).by(), c, timeout) // is recorded, and never nil
			return result, nil, nil, err
		}
		answered, c.Confirmation = true, req.Params.RequestState
	}
	result, content, err = s.run(ctx, visitOf(ctx).by(), c, timeout)
	e := devices.AsError(errOr(err))
	switch {
	case err == nil || e.Code != devices.CodeConfirmation:
		return result, content, nil, err
	case answered:
		return result, nil, nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: "the confirmation came too late or is for another call; the tool was not called"}
	case !canAsk(req.Session):
		return result, nil, nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: fmt.Sprintf("a person has to confirm this call, and this host cannot ask one (it lacks elicitation); "+
			"a person can make it with POST /v1/devices/%s/tools/%s/call and the confirmation that its first answer, 428, carries", c.Device, c.Tool)}
	}
	shown, ok := showable(c.Arguments)
	if !ok || clean(c.Tool, maxTitle) != c.Tool {
		return result, nil, nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: fmt.Sprintf("a person has to confirm this call, and cannot be shown all of its arguments "+
			"(at most %d bytes, and nothing invisible in them); a person can make it with POST /v1/devices/%s/tools/.../call", maxShownArgs, c.Device)}
	}
	return result, nil, &mcp.CallToolResult{
		InputRequests: mcp.InputRequestMap{askConfirm: &mcp.ElicitParams{Mode: "form", Message: s.question(ctx, c, shown),
			RequestedSchema: json.RawMessage(`{"type":"object","properties":{}}`)}},
		RequestState: e.Confirmation,
	}, nil
}

// errOr keeps AsError away from nil.
func errOr(err error) error {
	if err == nil {
		return devices.ErrNotFound
	}
	return err
}

// canAsk tells whether the host can put a question to a person.
func canAsk(session *mcp.ServerSession) bool {
	p := session.InitializeParams()
	if p == nil || p.Capabilities == nil || p.Capabilities.Elicitation == nil {
		return false
	}
	e := p.Capabilities.Elicitation
	return e.Form != nil || e.URL == nil
}

func (s *Server) question(ctx context.Context, c devices.ToolCall, shown string) string {
	name := string(c.Device)
	if d, err := s.opt.Service.Get(ctx, c.Device); err == nil && d.Device.Name != "" {
		name = clean(d.Device.Name, maxTitle) + " (" + name + ")"
	}
	text := fmt.Sprintf("Run %s on the device %s", clean(c.Tool, maxTitle), name)
	if shown != "{}" {
		text += " with " + shown
	}
	return text + "?"
}

// showable is a call's arguments as a person reads them: decoded, so that no
// escape hides what stands there, and whole. False if they cannot be shown so.
func showable(arguments json.RawMessage) (text string, ok bool) {
	if len(bytes.TrimSpace(arguments)) == 0 {
		return "{}", true
	}
	decoder := json.NewDecoder(bytes.NewReader(arguments))
	decoder.UseNumber()
	var v any
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if decoder.Decode(&v) != nil || e.Encode(v) != nil {
		return "", false
	}
	text = strings.TrimSpace(b.String())
	// Members given twice are told apart by their number alone.
	return text, len(text) <= maxShownArgs && clean(text, maxShownArgs+len("…")) == text && membersOf(arguments) == membersOf([]byte(text))
}

// membersOf counts the members of an object.
func membersOf(object []byte) (n int) {
	for walk := jsonspan.Object(object); walk.Next(); n++ {
	}
	return n
}

// contents turns what a device answered into what hosts take. Items of a kind
// that is not known are shown as the text they are.
func contents(raw json.RawMessage) []mcp.Content {
	out := []mcp.Content{}
	walk := jsonspan.Array(raw)
	for walk.Next() {
		out = append(out, contentOf(walk.Value()))
	}
	return out
}

func contentOf(item []byte) mcp.Content {
	member := func(name string) string {
		text, _ := jsonspan.String(jsonspan.Member(item, name))
		return text
	}
	switch member("type") {
	case "text":
		return &mcp.TextContent{Text: cleanText(member("text"))}
	case "image":
		if data, err := base64.StdEncoding.DecodeString(member("data")); err == nil && len(data) > 0 {
			return &mcp.ImageContent{Data: data, MIMEType: mediaType(member("mimeType"), data)}
		}
	case "audio":
		if data, err := base64.StdEncoding.DecodeString(member("data")); err == nil && len(data) > 0 {
			return &mcp.AudioContent{Data: data, MIMEType: mediaType(member("mimeType"), data)}
		}
	}
	return &mcp.TextContent{Text: string(appendClean(nil, item, 0))}
}

// media is what the type of a picture or a sound looks like.
var media = regexp.MustCompile(`^(image|audio)/[A-Za-z0-9][A-Za-z0-9.+-]{0,60}$`)

// mediaType is the type that a device gives, if it is one, else what the data look
// like.
func mediaType(said string, data []byte) string {
	if media.MatchString(said) {
		return said
	}
	return http.DetectContentType(data)
}

// photos adds the photo that an answer names: the tools of cameras and screens
// upload what they took, and say where it is. The name comes from the device,
// so it only counts for a photo of that very device, taken during this call.
func (s *Server) photos(ctx context.Context, id devices.ID, begun time.Time, content []mcp.Content) []mcp.Content {
	for _, item := range content {
		text, ok := item.(*mcp.TextContent)
		if !ok || len(text.Text) > maxPhotoText || jsonspan.KindOf([]byte(text.Text)) != jsonspan.KindObject {
			continue
		}
		name, ok := jsonspan.String(jsonspan.Member([]byte(text.Text), "photo"))
		if !ok || name == "" {
			continue
		}
		if jpeg := s.photo(ctx, id, name, begun); jpeg != nil {
			return append(content, &mcp.ImageContent{Data: jpeg, MIMEType: "image/jpeg"})
		}
	}
	return content
}

func (s *Server) photo(ctx context.Context, id devices.ID, name string, begun time.Time) []byte {
	photo, body, err := s.opt.Photos.Open(ctx, name)
	if err != nil {
		return nil // the text names it; whoever wants it asks again
	}
	defer func() { _ = body.Close() }()
	if photo.Device != id || photo.TakenAt.Before(begun.Add(-clockSlack)) || photo.TakenAt.After(time.Now().Add(clockSlack)) {
		return nil
	}
	jpeg, err := io.ReadAll(io.LimitReader(body, maxPhoto+1))
	if err != nil || len(jpeg) > maxPhoto {
		return nil
	}
	return jpeg
}
