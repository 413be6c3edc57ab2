//lint:file-ignore SA1019 the suite tests what the protocol has deprecated, too

package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// askValue is an elicitation of one value.
func askValue(message, name, kind string) *mcp.ElicitParams {
	return &mcp.ElicitParams{Message: message, RequestedSchema: json.RawMessage(fmt.Sprintf(`{"type":"object","properties":{%q:{"type":%q}},"required":[%q]}`, name, kind, name))}
}

func askModel(text string, tokens int64) *mcp.CreateMessageParams {
	return &mcp.CreateMessageParams{Messages: []*mcp.SamplingMessage{{Role: "user", Content: &mcp.TextContent{Text: text}}}, MaxTokens: tokens}
}

// acceptedContent returns what a person entered; nil if the request was not accepted.
func acceptedContent(responses mcp.InputResponseMap, key string) map[string]any {
	if r, ok := responses[key].(*mcp.ElicitResult); ok && r != nil && r.Action == "accept" {
		return r.Content
	}
	return nil
}

func modelText(responses mcp.InputResponseMap, key string) (string, bool) {
	r, ok := responses[key].(*mcp.CreateMessageWithToolsResult)
	if !ok || r == nil {
		return "", false
	}
	for _, c := range r.Content {
		if text, ok := c.(*mcp.TextContent); ok {
			return text.Text, true
		}
	}
	return "", true
}

func inputRequired(state string, requests mcp.InputRequestMap) *mcp.CallToolResult {
	return &mcp.CallToolResult{InputRequests: requests, RequestState: state}
}

var errState = &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "invalid requestState"}

func isTampered(state string) bool { return strings.HasSuffix(state, "-TAMPERED") }

const (
	fixtureDefaults = `{"type":"object","properties":{"name":{"type":"string","description":"User name","default":"John Doe"},` +
		`"age":{"type":"integer","description":"User age","default":30},"score":{"type":"number","description":"User score","default":95.5},` +
		`"status":{"type":"string","description":"User status","enum":["active","inactive","pending"],"default":"active"},` +
		`"verified":{"type":"boolean","description":"Verification status","default":true}}}`
	fixtureTitles = `[{"const":"value1","title":"First Option"},{"const":"value2","title":"Second Option"},{"const":"value3","title":"Third Option"}]`
	fixtureEnums  = `{"type":"object","properties":{"untitledSingle":{"type":"string","enum":["option1","option2","option3"]},` +
		`"titledSingle":{"type":"string","oneOf":` + fixtureTitles + `},` +
		`"legacyEnum":{"type":"string","enum":["opt1","opt2","opt3"],"enumNames":["Option One","Option Two","Option Three"]},` +
		`"untitledMulti":{"type":"array","minItems":1,"maxItems":3,"items":{"type":"string","enum":["option1","option2","option3"]}},` +
		`"titledMulti":{"type":"array","minItems":1,"maxItems":3,"items":{"anyOf":` + fixtureTitles + `}}}}`
)

// addFixtureInputs adds the tools that request input from the client.
func addFixtureInputs(server *mcp.Server) {
	elicits := func(name string, params func(arguments json.RawMessage) *mcp.ElicitParams) {
		addFixtureTool(server, name, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			r, err := req.Session.Elicit(ctx, params(req.Params.Arguments))
			if err != nil {
				return nil, err
			}
			return textResult("Elicitation result: action=%s, content=%v", r.Action, r.Content), nil
		})
	}
	elicits("test_elicitation", func(arguments json.RawMessage) *mcp.ElicitParams {
		var in struct{ Message string }
		_ = json.Unmarshal(arguments, &in) // absent arguments fail the suite's check
		return askValue(in.Message, "username", "string")
	})
	elicits("test_elicitation_sep1034_defaults", func(json.RawMessage) *mcp.ElicitParams {
		return &mcp.ElicitParams{Message: "Test defaults for primitives", RequestedSchema: json.RawMessage(fixtureDefaults)}
	})
	elicits("test_elicitation_sep1330_enums", func(json.RawMessage) *mcp.ElicitParams {
		return &mcp.ElicitParams{Message: "Test enum schemas", RequestedSchema: json.RawMessage(fixtureEnums)}
	})
	addFixtureTool(server, "test_sampling", func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		var in struct{ Prompt string }
		_ = json.Unmarshal(req.Params.Arguments, &in) // absent arguments fail the suite's check
		r, err := req.Session.CreateMessage(ctx, askModel(in.Prompt, 100))
		if err != nil {
			return nil, err
		}
		text, _ := r.Content.(*mcp.TextContent)
		if text == nil {
			text = &mcp.TextContent{}
		}
		return textResult("LLM response: %s", text.Text), nil
	})
	input := func(kind string, f func(req *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error)) {
		addFixtureTool(server, "test_input_required_result_"+kind, func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return f(req, req.Params.InputResponses)
		})
	}
	name := func() *mcp.ElicitParams { return askValue("What is your name?", "name", "string") }
	input("elicitation", func(_ *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		if who, _ := acceptedContent(in, "user_name")["name"].(string); who != "" {
			return textResult("Hello, %s!", who), nil
		}
		return inputRequired("", mcp.InputRequestMap{"user_name": name()}), nil
	})
	input("sampling", func(_ *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		if text, ok := modelText(in, "capital_question"); ok {
			return textResult("Sampling response: %s", text), nil
		}
		return inputRequired("", mcp.InputRequestMap{"capital_question": askModel("What is the capital of France?", 100)}), nil
	})
	input("list_roots", func(_ *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		if r, ok := in["client_roots"].(*mcp.ListRootsResult); ok && r != nil {
			return textResult("Client exposed %d root(s)", len(r.Roots)), nil
		}
		return inputRequired("", mcp.InputRequestMap{"client_roots": &mcp.ListRootsParams{}}), nil
	})
	confirm := func(req *mcp.CallToolRequest, state string) (*mcp.CallToolResult, error) {
		switch {
		case isTampered(req.Params.RequestState):
			return nil, errState
		case acceptedContent(req.Params.InputResponses, "confirm") != nil && req.Params.RequestState != "":
			return textResult("state-ok: requestState received and confirmation accepted"), nil
		case acceptedContent(req.Params.InputResponses, "confirm") != nil:
			return nil, errState
		}
		return inputRequired(state, mcp.InputRequestMap{"confirm": askValue("Please confirm", "ok", "boolean")}), nil
	}
	input("request_state", func(req *mcp.CallToolRequest, _ mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		return confirm(req, "request_state")
	})
	input("tampered_state", func(req *mcp.CallToolRequest, _ mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		return confirm(req, "tampered_state")
	})
	input("multiple_inputs", func(_ *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		who, _ := acceptedContent(in, "user_name")["name"].(string)
		greeting, greeted := modelText(in, "greeting")
		roots, ok := in["client_roots"].(*mcp.ListRootsResult)
		if who != "" && greeted && ok && roots != nil {
			return textResult("%s %s, %d root(s) visible", greeting, who, len(roots.Roots)), nil
		}
		return inputRequired("multiple_inputs", mcp.InputRequestMap{"user_name": name(), "greeting": askModel("Generate a greeting", 50), "client_roots": &mcp.ListRootsParams{}}), nil
	})
	input("multi_round", func(req *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		switch state := req.Params.RequestState; state {
		case "":
			return inputRequired("round=1", mcp.InputRequestMap{"step1": askValue("Step 1: What is your name?", "name", "string")}), nil
		case "round=1":
			who, _ := acceptedContent(in, "step1")["name"].(string)
			return inputRequired("round=2;name="+cmp.Or(who, "unknown"), mcp.InputRequestMap{"step2": askValue("Step 2: What is your favorite color?", "color", "string")}), nil
		default:
			color, _ := acceptedContent(in, "step2")["color"].(string)
			return textResult("Multi-round complete: %s likes %s", strings.TrimPrefix(state, "round=2;name="), cmp.Or(color, "unknown")), nil
		}
	})
	input("capabilities", func(req *mcp.CallToolRequest, in mcp.InputResponseMap) (*mcp.CallToolResult, error) {
		if len(in) > 0 {
			return textResult("Capability-aware input requests fulfilled"), nil
		}
		c, requests := req.ClientCapabilities(), mcp.InputRequestMap{}
		if c != nil && c.Elicitation != nil {
			requests["user_name"] = name()
		}
		if c != nil && c.Sampling != nil {
			requests["greeting"] = askModel("Generate a short greeting", 50)
		}
		if c != nil && (c.RootsV2 != nil || c.Roots.ListChanged) {
			requests["client_roots"] = &mcp.ListRootsParams{}
		}
		if len(requests) == 0 {
			return textResult("No declared client capability supports an in-band input request"), nil
		}
		return inputRequired("", requests), nil
	})
}
