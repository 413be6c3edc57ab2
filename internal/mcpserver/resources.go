package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/finder"
	"fleetd/internal/jsonspan"
)

// Resources.
const (
	uriDevices   = "fleet://devices/"
	uriPhotos    = "fleet://photos/"
	partStatus   = "status"
	partTools    = "tools"
	resourcePage = 100
	maxComplete  = 100
	typeJSON     = "application/json"
	toolStatus   = "self.get_device_status"
)

// resourceTemplates are the templates of all resources.
var resourceTemplates = []*mcp.ResourceTemplate{
	{URITemplate: uriDevices + "{device}", Name: "device", Title: "Device", MIMEType: typeJSON, Description: "State of a device: connection, firmware, labels, how many tools."},
	{URITemplate: uriDevices + "{device}/status", Name: "device_status", Title: "Device status", MIMEType: typeJSON, Description: "The state that the device reports when asked: volume, screen, battery, network."},
	{URITemplate: uriDevices + "{device}/tools", Name: "device_tools", Title: "Device tools", MIMEType: typeJSON, Description: "The tools of a device that this key may call, with their schemas."},
	{URITemplate: uriPhotos + "{photo}", Name: "photo", Title: "Photo", MIMEType: "image/jpeg", Description: "A photo that a device took, by the id from a tool result or an event."},
}

// resource is a parsed URI.
type resource struct {
	device devices.ID
	part   string // of the device; empty for its state
	photo  string
}

func parseURI(uri string) (r resource, err error) {
	notFound := mcp.ResourceNotFoundError(uri)
	if photo, ok := strings.CutPrefix(uri, uriPhotos); ok && photo != "" {
		return resource{photo: photo}, nil
	}
	rest, ok := strings.CutPrefix(uri, uriDevices)
	if !ok {
		return r, notFound
	}
	name, part, found := strings.Cut(rest, "/")
	if found && part != partStatus && part != partTools {
		return r, notFound
	}
	if name, err = url.PathUnescape(name); err != nil {
		return r, notFound
	}
	if r.device, err = devices.ParseID(name); err != nil {
		return r, notFound
	}
	r.part = part
	return r, nil
}

func uriOf(id devices.ID) string { return uriDevices + string(id) }

// covers reports whether the addressed server serves a device.
func (v *requestInfo) covers(id devices.ID) bool { return v.device == "" || v.device == id }

// addResources registers one template for all URIs. The SDK's templates do not match
// unescaped colons, which every device id contains.
func (s *Server) addResources(server *mcp.Server) {
	server.AddResourceTemplate(&mcp.ResourceTemplate{URITemplate: "fleet://{+rest}", Name: "fleet"}, s.read)
}

// resourceLists answers requests for the lists of resources and templates.
func (s *Server) resourceLists(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		switch method {
		case "resources/list":
			cursor := ""
			if params, _ := req.GetParams().(*mcp.ListResourcesParams); params != nil {
				cursor = params.Cursor
			}
			return s.listResources(ctx, requestInfoOf(ctx), cursor)
		case "resources/templates/list":
			if params, _ := req.GetParams().(*mcp.ListResourceTemplatesParams); params != nil && params.Cursor != "" {
				return nil, badCursor
			}
			return &mcp.ListResourceTemplatesResult{ResourceTemplates: resourceTemplates, Cacheable: mcp.Cacheable{CacheScope: "private"}}, nil
		}
		return next(ctx, method, req)
	}
}

func (s *Server) listResources(ctx context.Context, v *requestInfo, cursor string) (*mcp.ListResourcesResult, error) {
	result := &mcp.ListResourcesResult{Resources: []*mcp.Resource{}, Cacheable: mcp.Cacheable{CacheScope: "private"}}
	if v.device != "" {
		for _, part := range []string{"", partStatus, partTools} {
			uri, name := uriOf(v.device), "device"
			if part != "" {
				uri, name = uri+"/"+part, "device_"+part
			}
			result.Resources = append(result.Resources, &mcp.Resource{URI: uri, Name: name, MIMEType: typeJSON})
		}
		return result, nil
	}
	after, err := s.place("resources", cursor)
	if err != nil {
		return nil, err
	}
	found, next, err := s.find(ctx, v.by(), devices.ListQuery{After: after, Limit: resourcePage}, fewPages)
	if err != nil {
		return nil, s.protocolError(ctx, err)
	}
	for _, d := range found {
		result.Resources = append(result.Resources, &mcp.Resource{URI: uriOf(d.Device.ID), Name: string(d.Device.ID), Title: cleantext.Short(d.Device.Name, maxTitle),
			Description: "A device, " + string(d.State), MIMEType: typeJSON})
	}
	result.NextCursor = s.cursor("resources", next)
	return result, nil
}

// protocolError returns the JSON-RPC error for a failure outside a tool call.
func (s *Server) protocolError(ctx context.Context, err error) error {
	s.note(requestInfoOf(ctx).by(), "resources", "", err)
	e := devices.AsError(err)
	code := int64(jsonrpc.CodeInternalError)
	switch e.Code {
	case devices.CodeBadRequest, devices.CodeForbidden, devices.CodeDeviceUnknown, devices.CodeNotFound:
		code = jsonrpc.CodeInvalidParams
	case devices.CodeInternal:
		return &jsonrpc.Error{Code: code, Message: "internal error; see the log of the node"}
	}
	return &jsonrpc.Error{Code: code, Message: string(e.Code) + ": " + e.Detail}
}

// read reads one resource.
func (s *Server) read(ctx context.Context, req *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
	v, uri := requestInfoOf(ctx), req.Params.URI
	of, err := parseURI(uri)
	if err != nil {
		return nil, err
	}
	if of.photo != "" {
		return s.readPhoto(ctx, v, uri, of.photo)
	}
	if !v.covers(of.device) {
		return nil, mcp.ResourceNotFoundError(uri)
	}
	view, err := s.viewOf(ctx, v.by(), of.device)
	if err != nil {
		if devices.AsError(err).Code == devices.CodeDeviceUnknown {
			return nil, mcp.ResourceNotFoundError(uri)
		}
		return nil, s.protocolError(ctx, err)
	}
	var answer any
	switch of.part {
	case "":
		answer = describe(view.device)
	case partTools:
		answer = toolsOf(view, "", len(view.tools))
	case partStatus:
		status, err := s.status(ctx, v.by(), view.device)
		if err != nil {
			return nil, s.protocolError(ctx, err)
		}
		answer = status
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return nil, s.protocolError(ctx, err)
	}
	return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: uri, MIMEType: typeJSON, Text: string(text)}}}, nil
}

func (s *Server) readPhoto(ctx context.Context, v *requestInfo, uri, id string) (*mcp.ReadResourceResult, error) {
	photo, body, err := s.opt.Photos.Open(ctx, v.by().Key(), id)
	switch {
	case err != nil && devices.AsError(err).Code == devices.CodeNotFound:
		return nil, mcp.ResourceNotFoundError(uri)
	case err != nil:
		return nil, s.protocolError(ctx, err)
	}
	defer func() { _ = body.Close() }()
	// Callers that may not see a photo do not learn its device.
	if !v.covers(photo.Device) || s.opt.Service.Permit(ctx, v.by(), access.ScopePhotos, photo.Device) != nil {
		return nil, mcp.ResourceNotFoundError(uri)
	}
	// Before it is in memory a second time: a client that does not read keeps it there until its deadline.
	if _, err := s.begin(ctx, v, photo.Bytes/connlimit.WorkBytes, false); err != nil {
		return nil, err
	}
	jpeg, err := io.ReadAll(io.LimitReader(body, maxPhoto))
	if err != nil {
		return nil, s.protocolError(ctx, err)
	}
	return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: uri, MIMEType: "image/jpeg", Blob: jpeg}}}, nil
}

// status is the state that a device reported.
type status struct {
	Device string          `json:"device"`
	State  devices.State   `json:"state"`
	Said   json.RawMessage `json:"said_by_device,omitempty"` // a string, if that was not JSON
}

func (s *Server) status(ctx context.Context, by access.Principal, d devices.View) (*status, error) {
	result, content, err := s.run(ctx, by, devices.ToolCall{Device: d.Device.ID, Tool: toolStatus}, 0)
	if err != nil {
		return nil, err
	}
	out := &status{Device: string(d.Device.ID), State: d.State}
	for _, item := range content {
		text, ok := item.(*mcp.TextContent)
		switch {
		case !ok:
		case !result.IsError && json.Valid([]byte(text.Text)):
			out.Said = appendClean(nil, []byte(text.Text), 0)
		default:
			out.Said = jsonspan.AppendString(nil, text.Text)
		}
	}
	return out, nil
}

// complete completes the ids of devices in resources; and in prompts their names, labels for a selection, and tools.
func (s *Server) complete(ctx context.Context, req *mcp.CompleteRequest) (*mcp.CompleteResult, error) {
	v, value := requestInfoOf(ctx), req.Params.Argument.Value
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var values []string
	var more bool
	var err error
	switch inPrompt := req.Params.Ref != nil && req.Params.Ref.Type == "ref/prompt"; req.Params.Argument.Name {
	case "device":
		values, more, err = s.completeDevice(ctx, v, value, inPrompt)
	case "select":
		if v.device == "" {
			values, err = s.completeLabel(ctx, v.by(), value)
		}
	case "tool":
		device := string(v.device)
		if c := req.Params.Context; c != nil && c.Arguments["device"] != "" {
			device = c.Arguments["device"]
		}
		values, err = s.completeTool(ctx, v, device, value)
	}
	if err != nil {
		return nil, s.protocolError(ctx, err)
	}
	result := &mcp.CompleteResult{Completion: mcp.CompletionResultDetails{Values: []string{}, HasMore: more || len(values) > maxComplete}}
	result.Completion.Values = append(result.Completion.Values, values[:min(len(values), maxComplete)]...)
	return result, nil
}

func (s *Server) completeDevice(ctx context.Context, v *requestInfo, value string, names bool) (values []string, more bool, err error) {
	prefix := strings.ToLower(value)
	if v.device != "" {
		if strings.HasPrefix(string(v.device), prefix) {
			values = append(values, string(v.device))
		}
		return values, false, nil
	}
	found, next, err := s.find(ctx, v.by(), devices.ListQuery{Text: prefix, Limit: maxComplete}, fewPages)
	for _, d := range found {
		name := cleantext.Short(d.Device.Name, maxTitle)
		switch {
		case names && name != "":
			values = append(values, name)
		case strings.HasPrefix(string(d.Device.ID), prefix):
			values = append(values, string(d.Device.ID))
		}
	}
	return values, next != "", err
}

// completeLabel completes the last term of a selection as key=value.
func (s *Server) completeLabel(ctx context.Context, by access.Principal, value string) (values []string, err error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, ""); err != nil {
		return nil, err
	}
	index, err := s.wordIndex.keeper.Index(ctx)
	if errors.Is(err, finder.ErrTooMany) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	before, prefix := "", value
	if at := strings.LastIndexByte(value, ','); at >= 0 {
		before, prefix = value[:at+1], strings.TrimSpace(value[at+1:])
	}
	labels, _ := index.Labels(visibleTo(by), maxKeys, maxComplete)
	for _, l := range labels {
		for _, of := range l.Values {
			if term := l.Key + "=" + of; strings.HasPrefix(term, prefix) {
				values = append(values, before+term)
			}
		}
	}
	return values, nil
}

// completeTool completes the tools of a device, or of all.
func (s *Server) completeTool(ctx context.Context, v *requestInfo, device, prefix string) (values []string, err error) {
	if device == "" {
		matches, err := s.opt.Service.SearchTools(ctx, v.by(), func(name, _ string) int { return strings.Count(name, prefix) }, maxComplete, 1)
		for _, m := range matches {
			values = append(values, cleantext.Short(m.Tool.Name, maxTitle))
		}
		slices.Sort(values)
		return slices.Compact(values), err
	}
	view, err := s.namedView(ctx, v.by(), device)
	if err != nil || !v.covers(view.device.Device.ID) {
		return nil, err
	}
	for _, t := range view.tools {
		if name := infoOf(t.indexedTool).Name; strings.Contains(name, prefix) {
			values = append(values, name)
		}
	}
	return values, nil
}
