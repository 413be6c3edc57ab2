//go:build conformance

//lint:file-ignore SA1019 the suite tests what the protocol has deprecated, too

package mcpserver

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// The fixtures are what the official conformance suite wants a server to have
// beside what it is there for. Names and texts are the suite's.

const (
	fixtureImage   = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
	fixtureAudio   = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA="
	fixtureWatched = "test://watched-resource"
	fixturePause   = 50 * time.Millisecond
)

func (s *Server) fixtureCapabilities(c *mcp.ServerCapabilities) {
	if s.opt.Fixtures {
		c.Tools.ListChanged, c.Prompts.ListChanged, c.Logging = true, true, &mcp.LoggingCapabilities{}
	}
}

// fixtureTools are those that the SDK knows, but for dispatch.
func (s *Server) fixtureTools(ctx context.Context, next mcp.MethodHandler, method string, req mcp.Request) ([]*mcp.Tool, error) {
	if !s.opt.Fixtures {
		return nil, nil
	}
	result, err := next(ctx, method, req)
	list, _ := result.(*mcp.ListToolsResult)
	if err != nil || list == nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Tools, func(t *mcp.Tool) bool { return t.Name == dispatchTool }), nil
}

func (s *Server) isFixture(uri string) bool {
	return s.opt.Fixtures && strings.HasPrefix(uri, "test://")
}

func (s *Server) listsFixtures() bool { return s.opt.Fixtures }

func (s *Server) addFixtures(server *mcp.Server) {
	if !s.opt.Fixtures {
		return
	}
	addFixtureTools(server)
	addFixtureInputs(server)
	addFixtureResources(server)
	addFixturePrompts(server)
	s.tasks.Go(func() {
		ticker := time.NewTicker(3 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-s.ctx.Done():
				return
			case <-ticker.C:
				_ = server.ResourceUpdated(s.ctx, &mcp.ResourceUpdatedNotificationParams{URI: fixtureWatched}) // it tells of no failure
			}
		}
	})
}

func decoded(text string) []byte {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		panic(err) // a constant of this file
	}
	return data
}

func said(format string, args ...any) *mcp.CallToolResult {
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprintf(format, args...)}}}
}

// fixture adds a tool without arguments worth a schema.
func fixture(server *mcp.Server, name string, f func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error)) {
	server.AddTool(&mcp.Tool{Name: name, Description: "Fixture of the conformance suite: " + name, InputSchema: schema(anySchema)}, f)
}

// gives adds a tool that always answers the same.
func gives(server *mcp.Server, name string, content ...mcp.Content) {
	fixture(server, name, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return &mcp.CallToolResult{Content: content}, nil
	})
}

func addFixtureTools(server *mcp.Server) {
	image := &mcp.ImageContent{Data: decoded(fixtureImage), MIMEType: "image/png"}
	embedded := func(uri string) mcp.Content {
		return &mcp.EmbeddedResource{Resource: &mcp.ResourceContents{URI: uri, MIMEType: "text/plain", Text: "This is an embedded resource"}}
	}
	gives(server, "test_simple_text", &mcp.TextContent{Text: "This is a simple text response for testing."})
	gives(server, "test_image_content", image)
	gives(server, "test_audio_content", &mcp.AudioContent{Data: decoded(fixtureAudio), MIMEType: "audio/wav"})
	gives(server, "test_embedded_resource", embedded("test://embedded-resource"))
	gives(server, "test_multiple_content_types", &mcp.TextContent{Text: "This is text content"}, image, embedded("test://embedded-in-multiple"))
	gives(server, "test_streaming_elicitation", &mcp.TextContent{Text: "result frames only, no top-level requests"})
	fixture(server, "test_tool_with_logging", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		for _, text := range []string{"Tool execution started", "Tool processing data", "Tool execution completed"} {
			if err := req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Data: text}); err != nil {
				return nil, err
			}
			time.Sleep(fixturePause)
		}
		return said("Tool with logging executed successfully"), nil
	})
	fixture(server, "test_logging_tool", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		err := req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Data: "test_logging_tool executed"})
		return said("Log attempted"), err
	})
	fixture(server, "test_tool_with_progress", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		token := req.Params.GetProgressToken()
		for _, at := range []float64{0, 50, 100} {
			if err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: at, Total: 100,
				Message: fmt.Sprintf("Completed step %.0f of 100", at)}); err != nil {
				return nil, err
			}
			time.Sleep(fixturePause)
		}
		return said("%v", token), nil
	})
	fixture(server, "test_error_handling", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r := said("this tool intentionally returns an error for testing")
		r.IsError = true
		return r, nil
	})
	fixture(server, "test_reconnection", func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		if req.Extra != nil && req.Extra.CloseSSEStream != nil {
			req.Extra.CloseSSEStream(mcp.CloseSSEStreamArgs{RetryAfter: 10 * time.Millisecond})
		}
		time.Sleep(2 * fixturePause)
		return said("Reconnection test completed successfully. If you received this, the client properly reconnected after stream closure."), nil
	})
	fixture(server, "test_missing_capability", func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		if c := req.ClientCapabilities(); c != nil && c.Sampling != nil {
			return said("Client declared the sampling capability; tool executed."), nil
		}
		data, err := json.Marshal(mcp.MissingRequiredClientCapabilityData{RequiredCapabilities: &mcp.ClientCapabilities{Sampling: &mcp.SamplingCapabilities{}}})
		if err != nil {
			return nil, err
		}
		return nil, &jsonrpc.Error{Code: mcp.CodeMissingRequiredClientCapabilities, Message: "sampling capability required but not declared by client", Data: data}
	})
	fixture(server, "test_trigger_tool_change", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		gives(server, "transient_tool_for_list_changed")
		return said("tools_list_changed published"), nil
	})
	fixture(server, "test_trigger_prompt_change", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		server.AddPrompt(&mcp.Prompt{Name: "transient_prompt_for_list_changed", Description: "Fixture of the conformance suite"},
			func(context.Context, *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
				return &mcp.GetPromptResult{}, nil
			})
		return said("prompts_list_changed published"), nil
	})
	server.AddTool(&mcp.Tool{Name: "json_schema_2020_12_tool", Description: "Fixture of the conformance suite: JSON Schema 2020-12", InputSchema: schema(fixtureSchema)},
		func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return said("JSON Schema 2020-12 tool called with: %s", req.Params.Arguments), nil
		})
	server.AddTool(&mcp.Tool{Name: "test_x_mcp_header", Description: "Fixture of the conformance suite: Mcp-Param headers", InputSchema: schema(
		`{"type":"object","properties":{"region":{"type":"string","x-mcp-header":"Region"},"level":{"type":"integer"}}}`)},
		func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return said("%s", req.Params.Arguments), nil
		})
}

const fixtureSchema = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object",
	"$defs":{"address":{"$anchor":"addressDef","type":"object","properties":{"street":{"type":"string"},"city":{"type":"string"}}}},
	"properties":{"name":{"type":"string"},"address":{"$ref":"#/$defs/address"},"contactMethod":{"type":"string","enum":["phone","email"]},
		"phone":{"type":"string"},"email":{"type":"string"}},
	"allOf":[{"anyOf":[{"required":["phone"]},{"required":["email"]}]}],
	"if":{"properties":{"contactMethod":{"const":"phone"}},"required":["contactMethod"]},
	"then":{"required":["phone"]},"else":{"required":["email"]},"additionalProperties":false}`

func addFixtureResources(server *mcp.Server) {
	text := func(uri, text string) mcp.ResourceHandler {
		return func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: uri, MIMEType: "text/plain", Text: text}}}, nil
		}
	}
	server.AddResource(&mcp.Resource{Name: "static-text", Description: "A static text resource for testing", MIMEType: "text/plain", URI: "test://static-text"},
		text("test://static-text", "This is the content of the static text resource."))
	server.AddResource(&mcp.Resource{Name: "watched-resource", Description: "A resource that changes every 3 seconds", MIMEType: "text/plain", URI: fixtureWatched},
		text(fixtureWatched, "Watched resource content"))
	server.AddResource(&mcp.Resource{Name: "static-binary", Description: "A static binary resource (image) for testing", MIMEType: "image/png", URI: "test://static-binary"},
		func(context.Context, *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: "test://static-binary", MIMEType: "image/png", Blob: decoded(fixtureImage)}}}, nil
		})
	server.AddResourceTemplate(&mcp.ResourceTemplate{Name: "template", Description: "A resource template with parameter substitution", MIMEType: typeJSON, URITemplate: "test://template/{id}/data"},
		func(_ context.Context, req *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			id := strings.TrimSuffix(strings.TrimPrefix(req.Params.URI, "test://template/"), "/data")
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: req.Params.URI, MIMEType: typeJSON,
				Text: fmt.Sprintf(`{"id":%q,"templateTest":true,"data":"Data for ID: %s"}`, id, id)}}}, nil
		})
}

func addFixturePrompts(server *mcp.Server) {
	user := func(content ...mcp.Content) *mcp.GetPromptResult {
		r := &mcp.GetPromptResult{}
		for _, c := range content {
			r.Messages = append(r.Messages, &mcp.PromptMessage{Role: "user", Content: c})
		}
		return r
	}
	add := func(p *mcp.Prompt, f func(req *mcp.GetPromptRequest) *mcp.GetPromptResult) {
		server.AddPrompt(p, func(_ context.Context, req *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) { return f(req), nil })
	}
	add(&mcp.Prompt{Name: "test_simple_prompt", Description: "A simple prompt without arguments"}, func(*mcp.GetPromptRequest) *mcp.GetPromptResult {
		return user(&mcp.TextContent{Text: "This is a simple prompt for testing."})
	})
	add(&mcp.Prompt{Name: "test_prompt_with_arguments", Description: "A prompt with required arguments", Arguments: []*mcp.PromptArgument{
		{Name: "arg1", Description: "First test argument", Required: true}, {Name: "arg2", Description: "Second test argument", Required: true}}},
		func(req *mcp.GetPromptRequest) *mcp.GetPromptResult {
			return user(&mcp.TextContent{Text: fmt.Sprintf("Prompt with arguments: arg1='%s', arg2='%s'", req.Params.Arguments["arg1"], req.Params.Arguments["arg2"])})
		})
	add(&mcp.Prompt{Name: "test_prompt_with_embedded_resource", Description: "A prompt that includes an embedded resource", Arguments: []*mcp.PromptArgument{
		{Name: "resourceUri", Description: "URI of the resource to embed", Required: true}}},
		func(req *mcp.GetPromptRequest) *mcp.GetPromptResult {
			return user(&mcp.EmbeddedResource{Resource: &mcp.ResourceContents{URI: req.Params.Arguments["resourceUri"], MIMEType: "text/plain",
				Text: "Embedded resource content for testing."}}, &mcp.TextContent{Text: "Please process the embedded resource above."})
		})
	add(&mcp.Prompt{Name: "test_prompt_with_image", Description: "A prompt that includes image content"}, func(*mcp.GetPromptRequest) *mcp.GetPromptResult {
		return user(&mcp.ImageContent{Data: decoded(fixtureImage), MIMEType: "image/png"}, &mcp.TextContent{Text: "Please analyze the image above."})
	})
	add(&mcp.Prompt{Name: "test_input_required_result_prompt", Description: "Asks for context first"}, func(req *mcp.GetPromptRequest) *mcp.GetPromptResult {
		if content := accepted(req.Params.InputResponses, "user_context"); content != nil {
			return user(&mcp.TextContent{Text: fmt.Sprintf("Context: %v", content["context"])})
		}
		return &mcp.GetPromptResult{InputRequests: mcp.InputRequestMap{"user_context": asks("Please provide context for the prompt", "context", "string")}}
	})
}
