package fleettest

import (
	"net/http"
	"os/exec"
	"strings"
	"testing"
)

// Where a host looks for an authorization server the real node answers that there is
// none, whether it shows a token or not.
func TestMCPWithoutAuthorizationServer(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	for _, path := range []string{"/register", "/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"} {
		for _, token := range []string{"", "wrong"} {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, node.Info.API+path, strings.NewReader(`{}`))
			if err != nil {
				t.Fatal(err)
			}
			if token != "" {
				r.Header.Set("Authorization", "Bearer "+token)
			}
			response, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			if _ = response.Body.Close(); response.StatusCode != http.StatusNotFound {
				t.Errorf("%s, token %q: %d", path, token, response.StatusCode)
			}
		}
	}
}

// A host that writes its calls and closes its end reads all answers, also that of a
// device which takes its time.
func TestMCPPipeToTheEnd(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", "1", "--profile", "robot", "--seed", "5")
	node.AwaitReady(t, 1)
	command := exec.CommandContext(t.Context(), node.programs.Fleetd, "mcp", "--data-dir", node.Dir)
	command.Stdin = strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"` + node.List(t)[0].ID + `","tool":"self.test.sleep","arguments":{"ms":1000}}}}
`)
	out, err := command.Output()
	if err != nil || !strings.Contains(string(out), `"id":2`) || !strings.Contains(string(out), `\"is_error\":false`) {
		t.Errorf("%v, %s", err, out)
	}
}
