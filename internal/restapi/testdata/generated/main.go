// A program that uses the client which ogen generates from
// docs/reference/openapi.json: the calls of the README. scripts/openapi-client
// runs it as GENERATED API-URL TOKEN.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/go-faster/jx"

	"openapiclient/api"
)

type token string

// Token implements api.SecuritySource.
func (t token) Token(context.Context, api.OperationName) (api.Token, error) {
	return api.Token{Token: string(t)}, nil
}

func main() {
	log.SetFlags(0)
	ctx := context.Background()
	c, err := api.NewClient(os.Args[1], token(os.Args[2]))
	must(err)
	answer, err := c.ListDevices(ctx, api.ListDevicesParams{Select: api.NewOptString("state=online")})
	must(err)
	list, ok := answer.(*api.ListDevice)
	if !ok || len(list.Items) == 0 {
		log.Fatalf("devices: %+v", answer)
	}
	id := list.Items[0].ID
	tools, err := c.ListTools(ctx, api.ListToolsParams{Device: id})
	must(err)
	if t, ok := tools.(*api.ToolList); !ok || len(t.Items) == 0 {
		log.Fatalf("tools of %s: %+v", id, tools)
	}
	call := func(volume string) api.CallToolRes {
		body := api.ToolCall{Arguments: api.NewOptToolCallArguments(api.ToolCallArguments{"volume": jx.Raw(volume)})}
		answer, err := c.CallTool(ctx, api.NewOptToolCall(body), api.CallToolParams{Device: id, Tool: "self.audio_speaker.set_volume"})
		must(err)
		return answer
	}
	if r, ok := call("40").(*api.ToolResult); !ok || r.IsError || len(r.Content) != 1 {
		log.Fatalf("volume 40: %+v", r)
	}
	if p, ok := call("400").(*api.ProblemStatusCode); !ok || p.StatusCode != 422 || p.Response.Code != "invalid_arguments" {
		log.Fatalf("volume 400: %+v", p)
	}
	key, err := c.CreateKey(ctx, &api.NewKey{Name: "generated client", Scopes: []string{"devices:read"}})
	must(err)
	created, ok := key.(*api.CreatedKeyHeaders)
	if !ok || created.Response.Token == "" || created.Response.ID == "" {
		log.Fatalf("key: %+v", key)
	}
	if c, err = api.NewClient(os.Args[1], token(created.Response.Token)); err != nil {
		log.Fatal(err)
	}
	if p, ok := call("40").(*api.ProblemStatusCode); !ok || p.StatusCode != 403 {
		log.Fatalf("a key that may only read calls a tool: %+v", p)
	}
	fmt.Println("openapi-client: devices, tools, calls and keys through the generated client")
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
