//lint:file-ignore SA1019 the suite tests what the protocol has deprecated, too

package mcpserver

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/connlimit"
)

// The fixtures are the tools, resources and prompts that the official conformance
// suite expects of a server. Names and texts are given by the suite.

const (
	fixtureImage   = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
	fixtureAudio   = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA="
	fixtureWatched = "test://watched-resource"
	fixturePause   = 50 * time.Millisecond
)

// The official suite runs all requirements of a revision against the fixtures, which the fleet's server has in place of its own tools and
// resources. scripts/conformance installs the suite, and runs what applies to the product against whole nodes, too.
func TestConformance(t *testing.T) {
	if os.Getenv("FLEETD_TEST_CONFORMANCE") == "" {
		t.Skip("IN VERIFY: scripts/conformance installs the suite")
	}
	f := newFleet(t, func(opt *Options) { opt.Auth.Open = true })
	f.mcp.fleet = f.mcp.newEndpoint(newFixtureServer(f.mcp))
	server := httptest.NewUnstartedServer(connlimit.RespondEarly(f.mcp, connlimit.DefaultPace)) // as a node serves it
	server.Config.ConnContext = connlimit.WithConn
	server.Start()
	t.Cleanup(server.Close)
	for _, revision := range []string{"2025-11-25", "2026-07-28"} {
		t.Run(revision, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), "conformance", "server", "--url", server.URL+PathMCP, "--requirements", revision, "-o", t.TempDir()).CombinedOutput()
			_, summary, _ := strings.Cut(string(out), "=== SUMMARY")
			t.Log(summary)
			if err != nil { // the exit status is that of the scored scenarios
				t.Error(err)
			}
		})
	}
}

// newFixtureServer returns a server with the fixtures, and updates the watched resource until s is closed.
func newFixtureServer(s *Server) *mcp.Server {
	options := s.serverOptions(fleetInstructions, &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{ListChanged: true}, Prompts: &mcp.PromptCapabilities{ListChanged: true},
		Resources: &mcp.ResourceCapabilities{Subscribe: true}, Completions: &mcp.CompletionCapabilities{}, Logging: &mcp.LoggingCapabilities{}})
	options.SubscribeHandler = func(ctx context.Context, req *mcp.SubscribeRequest) error {
		return s.subscriptions.add(req.Session, req.Params.URI, subscription{requestInfoOf(ctx), ""})
	}
	server := mcp.NewServer(&mcp.Implementation{Name: "fixtures", Version: s.opt.Version}, options)
	s.addResources(server)
	s.addPrompts(server, false)
	addFixtureTools(server)
	addFixtureInputs(server)
	addFixtureResources(server)
	addFixturePrompts(server)
	server.AddReceivingMiddleware(s.common)
	server.AddSendingMiddleware(s.filterPermitted)
	s.tasks.Go(func() {
		ticker := time.NewTicker(3 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-s.ctx.Done():
				return
			case <-ticker.C:
				_ = server.ResourceUpdated(s.ctx, &mcp.ResourceUpdatedNotificationParams{URI: fixtureWatched}) // it returns no error
			}
		}
	})
	return server
}

func decoded(text string) []byte {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		panic(err) // a constant of this file
	}
	return data
}

func textResult(format string, args ...any) *mcp.CallToolResult {
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: fmt.Sprintf(format, args...)}}}
}

// addFixtureTool adds a tool without an input schema.
func addFixtureTool(server *mcp.Server, name string, f func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error)) {
	server.AddTool(&mcp.Tool{Name: name, Description: "Fixture of the conformance suite: " + name, InputSchema: json.RawMessage(`{"type":"object"}`)}, f)
}

// addConstantTool adds a tool with a constant result.
func addConstantTool(server *mcp.Server, name string, content ...mcp.Content) {
	addFixtureTool(server, name, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return &mcp.CallToolResult{Content: content}, nil
	})
}

func addFixtureTools(server *mcp.Server) {
	image := &mcp.ImageContent{Data: decoded(fixtureImage), MIMEType: "image/png"}
	embedded := func(uri string) mcp.Content {
		return &mcp.EmbeddedResource{Resource: &mcp.ResourceContents{URI: uri, MIMEType: "text/plain", Text: "This is an embedded resource"}}
	}
	addConstantTool(server, "test_simple_text", &mcp.TextContent{Text: "This is a simple text response for testing."})
	addConstantTool(server, "test_image_content", image)
	addConstantTool(server, "test_audio_content", &mcp.AudioContent{Data: decoded(fixtureAudio), MIMEType: "audio/wav"})
	addConstantTool(server, "test_embedded_resource", embedded("test://embedded-resource"))
	addConstantTool(server, "test_multiple_content_types", &mcp.TextContent{Text: "This is text content"}, image, embedded("test://embedded-in-multiple"))
	addConstantTool(server, "test_streaming_elicitation", &mcp.TextContent{Text: "result frames only, no top-level requests"})
	addFixtureTool(server, "test_tool_with_logging", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		for _, text := range []string{"Tool execution started", "Tool processing data", "Tool execution completed"} {
			if err := req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Data: text}); err != nil {
				return nil, err
			}
			time.Sleep(fixturePause)
		}
		return textResult("Tool with logging executed successfully"), nil
	})
	addFixtureTool(server, "test_logging_tool", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		err := req.Session.Log(ctx, &mcp.LoggingMessageParams{Level: "info", Data: "test_logging_tool executed"})
		return textResult("Log attempted"), err
	})
	addFixtureTool(server, "test_tool_with_progress", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		token := req.Params.GetProgressToken()
		for _, at := range []float64{0, 50, 100} {
			if err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: at, Total: 100,
				Message: fmt.Sprintf("Completed step %.0f of 100", at)}); err != nil {
				return nil, err
			}
			time.Sleep(fixturePause)
		}
		return textResult("%v", token), nil
	})
	addFixtureTool(server, "test_error_handling", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r := textResult("this tool intentionally returns an error for testing")
		r.IsError = true
		return r, nil
	})
	addFixtureTool(server, "test_reconnection", func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		if req.Extra != nil && req.Extra.CloseSSEStream != nil {
			req.Extra.CloseSSEStream(mcp.CloseSSEStreamArgs{RetryAfter: 10 * time.Millisecond})
		}
		time.Sleep(2 * fixturePause)
		return textResult("Reconnection test completed successfully. If you received this, the client properly reconnected after stream closure."), nil
	})
	addFixtureTool(server, "test_missing_capability", func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		if c := req.ClientCapabilities(); c != nil && c.Sampling != nil {
			return textResult("Client declared the sampling capability; tool executed."), nil
		}
		data, err := json.Marshal(mcp.MissingRequiredClientCapabilityData{RequiredCapabilities: &mcp.ClientCapabilities{Sampling: &mcp.SamplingCapabilities{}}})
		if err != nil {
			return nil, err
		}
		return nil, &jsonrpc.Error{Code: mcp.CodeMissingRequiredClientCapabilities, Message: "sampling capability required but not declared by client", Data: data}
	})
	addFixtureTool(server, "test_trigger_tool_change", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		addConstantTool(server, "transient_tool_for_list_changed")
		return textResult("tools_list_changed published"), nil
	})
	addFixtureTool(server, "test_trigger_prompt_change", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		server.AddPrompt(&mcp.Prompt{Name: "transient_prompt_for_list_changed", Description: "Fixture of the conformance suite"},
			func(context.Context, *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
				return &mcp.GetPromptResult{}, nil
			})
		return textResult("prompts_list_changed published"), nil
	})
	server.AddTool(&mcp.Tool{Name: "json_schema_2020_12_tool", Description: "Fixture of the conformance suite: JSON Schema 2020-12", InputSchema: json.RawMessage(fixtureSchema)},
		func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return textResult("JSON Schema 2020-12 tool called with: %s", req.Params.Arguments), nil
		})
	server.AddTool(&mcp.Tool{Name: "test_x_mcp_header", Description: "Fixture of the conformance suite: Mcp-Param headers", InputSchema: json.RawMessage(
		`{"type":"object","properties":{"region":{"type":"string","x-mcp-header":"Region"},"level":{"type":"integer"}}}`)},
		func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return textResult("%s", req.Params.Arguments), nil
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
	server.AddResourceTemplate(&mcp.ResourceTemplate{Name: "template", Description: "A resource template with parameter substitution", MIMEType: "application/json", URITemplate: "test://template/{id}/data"},
		func(_ context.Context, req *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			id := strings.TrimSuffix(strings.TrimPrefix(req.Params.URI, "test://template/"), "/data")
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: req.Params.URI, MIMEType: "application/json",
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
		if content := acceptedContent(req.Params.InputResponses, "user_context"); content != nil {
			return user(&mcp.TextContent{Text: fmt.Sprintf("Context: %v", content["context"])})
		}
		return &mcp.GetPromptResult{InputRequests: mcp.InputRequestMap{"user_context": askValue("Please provide context for the prompt", "context", "string")}}
	})
}
