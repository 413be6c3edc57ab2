package fleettest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devicetest"
	"fleetd/simulator/firmware"
)

const (
	gatewayKey = "Gq7Tz9mKfleet"
	gatewayID  = "GID_default@@@02_00_00_00_06_01@@@36c98363-3656-43cb-a00f-8bced2391a90"
)

// gatewayLogin is what a device holds that xiaozhi-mqtt-gateway's OTA server
// set up, made as that server makes it.
func gatewayLogin(address, client string) login {
	user := base64.StdEncoding.EncodeToString([]byte(`{"ip":"1.2.3.4"}`))
	mac := hmac.New(sha256.New, []byte(gatewayKey))
	_, _ = io.WriteString(mac, client+"|"+user)
	return login{firmware.Login{Endpoint: address, ClientID: client, Username: user, Password: base64.StdEncoding.EncodeToString(mac.Sum(nil)), PublishTopic: "device-server", Keepalive: 30}}
}

// documented returns the shell commands of a section of a document, with
// values in place of its examples.
func documented(t *testing.T, file, section string, replace ...string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n"+section+"\n")
	_, rest, open := strings.Cut(rest, "```sh ")
	_, rest, _ = strings.Cut(rest, "\n") // why the test of all commands leaves them out
	block, _, closed := strings.Cut(rest, "```")
	if !found || !open || !closed {
		t.Fatalf("%s has no commands in %q", file, section)
	}
	for i := 0; i < len(replace); i += 2 {
		if !strings.Contains(block, replace[i]) {
			t.Fatalf("the commands in %q of %s do not contain %s", section, file, replace[i])
		}
		block = strings.ReplaceAll(block, replace[i], replace[i+1])
	}
	return block
}

// A device and a console that know nothing but xiaozhi-mqtt-gateway find
// everything where it was.
func TestGatewayCurlCommands(t *testing.T) {
	t.Parallel()
	api := freePort(t)
	node := programs.Start(t, "--gateway-api-listen", api, "--gateway-signature-key", gatewayKey)
	d := gatewayLogin(node.Setting("--mqtt-listen"), gatewayID).dial(t, devicetest.NewScript())
	node.AwaitReady(t, 1) // it never asked our OTA address

	const call = `{"type":"mcp","payload":{"method":"tools/call","params":{"name":"` + volume + `","arguments":{"volume":5}}}}`
	if _, err := exec.LookPath("curl"); err == nil {
		commands := documented(t, "../../docs/howto/from-mqtt-gateway.md", "## 2. Check", "KEY='...'", "KEY='"+gatewayKey+"'",
			"GID_default@@@aa_bb_cc_dd_ee_ff@@@aa_bb_cc_dd_ee_ff", "GID_other@@@02_00_00_00_06_01@@@02_00_00_00_06_01", // as consoles make ids up
			"localhost:8007", api, "self.get_device_status", volume, `"arguments":{}`, `"arguments":{"volume":5}`)
		out, err := exec.CommandContext(t.Context(), "bash", "-euc", commands).Output()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for _, want := range []string{`{"GID_other@@@02_00_00_00_06_01@@@02_00_00_00_06_01":{"isAlive":null,"exists":true}}`,
			`{"success":true,"data":{"content":[{"type":"text","text":"true"}],"isError":false}}`, "HTTP/1.1 200 OK", "X-Fleetd-Code: ok", "X-Fleetd-Operation: "} {
			if !strings.Contains(string(out), want) {
				t.Errorf("the documented commands printed no %s:\n%s", want, out)
			}
		}
	} else {
		t.Log("no curl here: its commands are not run")
	}

	token := func(day time.Time) string {
		sum := sha256.Sum256([]byte(day.UTC().Format(time.DateOnly) + gatewayKey))
		return "Bearer " + hex.EncodeToString(sum[:])
	}
	now := time.Now()
	post := func(path, authorization, body string) string {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+api+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header = http.Header{"Authorization": {authorization}, "Content-Type": {"application/json"}}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(response.StatusCode, " ", string(text))
	}
	const absent = "GID_x@@@02_00_00_00_06_99@@@y"
	script := func(tool string) string {
		return strings.Replace(call, volume, tool, 1)
	}
	for name, c := range map[string]struct{ path, authorization, body, want string }{
		"yesterday's token": {"/api/commands/" + gatewayID, token(now.AddDate(0, 0, -1)), call, `200 {"success":true,"data":{"content":[{"type":"text","text":"true"}],"isError":false}}`},
		"tomorrow's token":  {"/api/commands/" + gatewayID, token(now.AddDate(0, 0, 1)), call, `200 {"success":true,"data":{"content":[{"type":"text","text":"true"}],"isError":false}}`},
		"last week's token": {"/api/commands/" + gatewayID, token(now.AddDate(0, 0, -7)), call, `401 {"error":"无效的授权令牌"}`},
		"no token":          {"/api/commands/" + gatewayID, "", call, `401 {"error":"未提供有效的Authorization头"}`},
		"absent device":     {"/api/commands/" + absent, token(now), call, `500 {"success":false,"error":"设备未连接"}`},
		"absent, strict":    {"/api/commands/" + absent + "?strict=1", token(now), call, `404 {"success":false,"error":"设备未连接"}`},
		"another type":      {"/api/commands/" + gatewayID, token(now), `{"type":"tts","payload":{}}`, `500 {"success":false,"error":"指令类型无效"}`},
		"unknown tool":      {"/api/commands/" + gatewayID + "?strict=1", token(now), script("self.nope"), `404 {"success":false,"error":"`},
		"status":            {"/api/devices/status", token(now), `{"clientIds":["` + gatewayID + `","` + absent + `"]}`, `200 {"` + gatewayID + `":{"isAlive":null,"exists":true},"` + absent + `":{"isAlive":false,"exists":false}}`},
		"status, README":    {"/api/devices/status", token(now), `{"deviceIds":["` + gatewayID + `"]}`, `200 {"` + gatewayID + `":{"isAlive":null,"exists":true}}`},
		"status, no list":   {"/api/devices/status", token(now), `{}`, `400 {"error":"clientIds必须是一个数组"}`},
	} {
		if got := post(c.path, c.authorization, c.body); !strings.HasPrefix(got, c.want) || !strings.HasSuffix(c.want, `"`) && got != c.want {
			t.Errorf("%s: %s\nwant %s", name, got, c.want)
		}
	}
	d.hello(t)
	if got, want := post("/api/devices/status", token(now), `{"clientIds":["`+gatewayID+`"]}`), `200 {"`+gatewayID+`":{"isAlive":true,"exists":true}}`; got != want {
		t.Errorf("in a conversation: %s, want %s", got, want)
	}
	for name, l := range map[string]login{
		"two parts":      gatewayLogin(node.Setting("--mqtt-listen"), "GID_default@@@02_00_00_00_06_02"),
		"wrong password": {firmware.Login{Endpoint: node.Setting("--mqtt-listen"), ClientID: gatewayID, Username: "eyJpcCI6IjEuMi4zLjQifQ==", Password: "guess"}},
	} {
		if x, err := l.connect(devicetest.NewScript()); err == nil {
			x.Close()
			t.Errorf("%s was let in", name)
		}
	}
	if _, err := node.Device(t.Context(), "02:00:00:00:06:01"); err != nil {
		t.Error(err)
	}
}
