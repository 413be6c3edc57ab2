package mcpserver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jsonspan"
)

// Limits of results.
const (
	maxPhoto     = 4 << 20         // bytes, the limit of photo uploads
	clockSlack   = 5 * time.Second // tolerated clock difference between this node and the one that received the photo
	maxPhotoText = 16 << 10        // bytes of a result that may name a photo
	maxAnswer    = 16 << 10        // bytes of one text of a result
	maxShownArgs = 2000            // bytes of the arguments in a confirmation request
)

// confirmKey is the key of the confirmation in InputRequests.
const confirmKey = "confirm"

// failure describes to a host why a call has no result.
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
		return failure{Code: e.Code, Detail: "internal error; see the log of the node", Sent: e.Sent, Outcome: e.Outcome, Call: e.Call}
	}
	f := failure{Code: e.Code, Detail: cleantext.Lines(e.Detail), Rule: e.Rule, Sent: e.Sent, Outcome: e.Outcome, Call: e.Call}
	for _, fault := range e.Faults { // faults quote the device's schema
		f.Faults = append(f.Faults, devices.Fault{Pointer: cleantext.Lines(fault.Pointer), Detail: cleantext.Lines(fault.Detail)})
	}
	return f
}

// failed returns the result of a tool that failed. Models read it and can correct
// the call; a protocol error would reach only the host.
func (s *Server) failed(f failure) *mcp.CallToolResult {
	s.stats.Calls.Add(string(f.Code), 1)
	r := structured(struct {
		Error failure `json:"error"`
	}{f})
	r.IsError = true
	return r
}

func (s *Server) failedBy(err error) *mcp.CallToolResult { return s.failed(s.failure(err)) }

// note writes to the audit that a request was refused before it became a call. The core
// writes the entries of calls.
func (s *Server) note(by access.Principal, action string, id devices.ID, err error) {
	if e := devices.AsError(err); e.Code == devices.CodeForbidden || e.Code == devices.CodeUnauthorized {
		s.opt.Service.NoteRefusal(by, action, id, err)
	}
}

// structured returns a result with the same JSON as structured content and as text.
func structured(v any) *mcp.CallToolResult {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil { // strings, numbers and valid JSON can be encoded
		return &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: "the result cannot be written: " + err.Error()}}}
	}
	text := bytes.TrimSpace(b.Bytes())
	return &mcp.CallToolResult{StructuredContent: json.RawMessage(text), Content: []mcp.Content{&mcp.TextContent{Text: string(text)}}}
}

// run calls one tool of one device. c.Confirmation is the token of a confirmation
// request of the core. It is valid once, for this caller, device, tool and arguments.
func (s *Server) run(ctx context.Context, by access.Principal, c devices.ToolCall, timeout time.Duration) (devices.ToolResult, []mcp.Content, error) {
	timeout = cmp.Or(timeout, dispatch.TimeoutFor(c.Tool))
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c.Principal = by
	begun := time.Now()
	result, err := s.opt.Service.CallTool(ctx, c)
	if err != nil {
		if e := devices.AsError(err); e.Sent { // it may have had its effect
			s.history.called(&c, e.Call, nil)
		}
		return result, nil, err
	}
	content := contents(result.Content)
	var texts []string
	for _, item := range content {
		if text, ok := item.(*mcp.TextContent); ok && !result.IsError {
			texts = append(texts, text.Text)
		}
	}
	s.history.called(&c, result.Call, texts)
	return result, s.photos(ctx, c.Device, begun, content), nil
}

// runConfirmed runs a call that a person may have to confirm. If question is not nil, the
// host must ask the person first.
func (s *Server) runConfirmed(ctx context.Context, req *mcp.CallToolRequest, c devices.ToolCall, timeout time.Duration) (result devices.ToolResult, content []mcp.Content, question *mcp.CallToolResult, err error) {
	answered := false
	if answer, ok := req.Params.InputResponses[confirmKey]; ok {
		yes, isAnswer := answer.(*mcp.ElicitResult)
		if !isAnswer || yes.Action != "accept" {
			c.Confirmation = dispatch.Declined(tokenOf(req))
			_, _, err := s.run(ctx, requestInfoOf(ctx).by(), c, timeout) // records the refusal; err is never nil
			return result, nil, nil, err
		}
		answered, c.Confirmation = true, tokenOf(req)
	}
	result, content, err = s.run(ctx, requestInfoOf(ctx).by(), c, timeout)
	e := devices.AsError(errOr(err))
	switch {
	case err == nil || e.Code != devices.CodeConfirmation:
		return result, content, nil, err
	case answered:
		return result, nil, nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: "the confirmation has expired or belongs to another call; the tool was not called"}
	case !canElicit(req.Session):
		return result, nil, nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: fmt.Sprintf("a person must confirm this call, and this host cannot ask (it does not support elicitation); "+
			"a person can call POST /v1/devices/%s/tools/%s/call and repeat it with the confirmation of the 428 response", c.Device, c.Tool)}
	}
	shown, ok := displayArguments(c.Arguments)
	if !ok || cleantext.Short(c.Tool, maxTitle) != c.Tool {
		return result, nil, nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: fmt.Sprintf("a person must confirm this call, but its tool name or arguments cannot be shown completely "+
			"(arguments may have at most %d bytes and no member twice; neither may have invisible characters or two spaces in a row); a person can call POST /v1/devices/%s/tools/.../call", maxShownArgs, c.Device)}
	}
	return result, nil, &mcp.CallToolResult{
		InputRequests: mcp.InputRequestMap{confirmKey: &mcp.ElicitParams{Mode: "form", Message: s.question(ctx, c, shown),
			RequestedSchema: json.RawMessage(`{"type":"object","properties":{}}`)}},
		RequestState: e.Confirmation + " " + string(c.Device),
	}, nil
}

// tokenOf returns the token of the confirmation in the state of a request; a device that a person has chosen may follow.
func tokenOf(req *mcp.CallToolRequest) string {
	token, _, _ := strings.Cut(req.Params.RequestState, " ")
	return token
}

// errOr replaces nil, which AsError does not accept.
func errOr(err error) error {
	if err == nil {
		return devices.ErrNotFound
	}
	return err
}

// canElicit reports whether the host can ask a person (elicitation by form).
func canElicit(session *mcp.ServerSession) bool {
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
		name = cleantext.Short(d.Device.Name, maxTitle) + " (" + name + ")"
	}
	text := fmt.Sprintf("Run %s on the device %s", cleantext.Short(c.Tool, maxTitle), name)
	if shown != "{}" {
		text += " with " + shown
	}
	return text + "?"
}

// displayArguments returns the arguments as a person can read them, decoded, so that escapes
// hide nothing. ok is false if they cannot be shown completely.
func displayArguments(arguments json.RawMessage) (text string, ok bool) {
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
	// Decoding keeps one of several members with the same name, at any depth; only the count shows that.
	return text, len(text) <= maxShownArgs && cleantext.Short(text, maxShownArgs+len("…")) == text && countTokens(arguments) == countTokens([]byte(text))
}

// countTokens returns the number of names, values and brackets of a JSON document.
func countTokens(document []byte) (n int) {
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber()
	for {
		if _, err := decoder.Token(); err != nil {
			return n
		}
		n++
	}
}

// contents converts the content of a device's result to MCP content. Items of an
// unknown type become text.
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
		return &mcp.TextContent{Text: shorten(cleantext.Lines(member("text")))}
	case "image":
		if data, err := base64.StdEncoding.DecodeString(member("data")); err == nil && len(data) > 0 {
			return &mcp.ImageContent{Data: data, MIMEType: mediaType(member("mimeType"), data)}
		}
	case "audio":
		if data, err := base64.StdEncoding.DecodeString(member("data")); err == nil && len(data) > 0 {
			return &mcp.AudioContent{Data: data, MIMEType: mediaType(member("mimeType"), data)}
		}
	}
	return &mcp.TextContent{Text: shorten(string(appendClean(nil, item, 0)))}
}

// shorten cuts a text of a device that would fill the context of a model, and says so.
func shorten(text string) string {
	if len(text) <= maxAnswer {
		return text
	}
	cut := maxAnswer
	for cut > 0 && !utf8.RuneStart(text[cut]) {
		cut--
	}
	return fmt.Sprintf("%s [fleetd left out %d bytes]", text[:cut], len(text)-cut)
}

// mediaTypePattern matches the media types of images and sounds.
var mediaTypePattern = regexp.MustCompile(`^(image|audio)/[A-Za-z0-9][A-Za-z0-9.+-]{0,60}$`)

// mediaType returns the type that the device reported if it is valid, else the type
// detected from the data.
func mediaType(reported string, data []byte) string {
	if mediaTypePattern.MatchString(reported) {
		return reported
	}
	return http.DetectContentType(data)
}

// photos adds the photo that a result names: camera and screen tools upload the photo
// and return its id. The id comes from the device, so only a photo of the same device,
// taken during this call, is accepted.
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
	photo, body, err := s.opt.Photos.Open(ctx, requestInfoOf(ctx).by().Key(), name)
	if err != nil {
		return nil // the text contains the id, with which the host can read the photo
	}
	defer func() { _ = body.Close() }()
	if photo.Device != id || photo.TakenAt.Before(begun.Add(-clockSlack)) || photo.TakenAt.After(clock.Now().Add(clockSlack)) {
		return nil
	}
	jpeg, err := io.ReadAll(io.LimitReader(body, maxPhoto+1))
	if err != nil || len(jpeg) > maxPhoto {
		return nil
	}
	return jpeg
}
