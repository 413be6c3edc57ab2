package gatewayapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/jsonspan"
	"fleetd/internal/jsontest"
)

const callVolume = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"self.audio_speaker.set_volume","arguments":{"volume":50}}}`

// TestCommandGolden holds answers against those that the gateway's own code
// gave to the same requests, with a device that behaves the same.
func TestCommandGolden(t *testing.T) {
	f := newFleet(t).listen(t)
	script := devicetest.NewScript()
	answer := ""
	script.Call = func(string, json.RawMessage) string { return answer }
	script.Other = func(r devicetest.Request) string {
		if r.Method == "resources/read" {
			return `"error":{"code":-1}`
		}
		return ""
	}
	f.connect(t, robot, script)
	const list = `{"success":true,"data":{"tools":[` + devicetest.Volume + `,` + devicetest.Reboot + `]}}`
	for _, c := range []struct {
		name, path, body, answer string
		status                   int
		code                     devices.Code
		want                     string
	}{
		{"call", commandRobot, mcp(callVolume), devicetest.True, 200, CodeOK,
			`{"success":true,"data":{"content":[{"type":"text","text":"true"}],"isError":false}}`},
		{"list", commandRobot, mcp(`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":{"withUserTools":true}}`), "", 200, CodeOK, list},
		{"list without params", commandRobot, mcp(`{"method":"tools/list"}`), "", 200, CodeOK, list},
		{"null params", commandRobot, mcp(`{"method":"tools/list","params":null}`), "", 200, CodeOK, list},
		{"escaped @", strings.ReplaceAll(commandRobot, "@", "%40"), mcp(`{"method":"tools/list"}`), "", 200, CodeOK, list},
		{"slash at the end", commandRobot + "/", mcp(`{"method":"tools/list"}`), "", 200, CodeOK, list},
		{"keys twice", commandRobot, `{"type":"x","payload":1,"type":"mcp","payload":{"method":"x","method":"tools/list"}}`, "", 200, CodeOK, list},
		{"device error", commandRobot, mcp(callVolume), `"error":{"message":"no \"volume\" <&>\u2028\u007f\b\u0001\n你"}`, 500, devices.CodeDeviceError,
			failed("no \\\"volume\\\" <&>\u2028\u007f\\b\\u0001\\n你")},
		{"error without message", commandRobot, mcp(`{"method":"resources/read"}`), "", 500, devices.CodeDeviceError, failed("")},
		{"not implemented", commandRobot, mcp(`{"method":"resources/list"}`), "", 500, devices.CodeDeviceError, failed("Method not implemented: resources/list")},
		{"refused arguments", commandRobot, mcp(callVolume), `"error":{"message":"Missing valid argument: volume"}`, 500, devices.CodeInvalidArguments,
			failed("Missing valid argument: volume")},
		{"unknown tool", commandRobot, mcp(`{"method":"tools/call","params":{"name":"self.\"x"}}`), "", 500, devices.CodeToolUnknown, failed(`Unknown tool: self.\"x`)},
		{"bad type", commandRobot, `{"type":"x","payload":{}}`, "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"type no string", commandRobot, `{"type":["mcp"],"payload":{"method":"tools/list"}}`, "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"no payload", commandRobot, `{"type":"mcp"}`, "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"null payload", commandRobot, mcp("null"), "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"false payload", commandRobot, mcp("false"), "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"array", commandRobot, `[]`, "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"no body", commandRobot, ``, "", 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"offline", "/api/commands/GID_x@@@11_22_33_44_55_66@@@u", mcp(`{"method":"tools/list"}`), "", 500, devices.CodeDeviceUnknown, failed("设备未连接")},
		{"offline and bad type", "/api/commands/GID_x@@@11_22_33_44_55_66@@@u", `{"type":"x"}`, "", 500, devices.CodeDeviceUnknown, failed("设备未连接")},
		{"no client id", "/api/commands/x", mcp(`{"method":"tools/list"}`), "", 500, devices.CodeDeviceUnknown, failed("设备未连接")},
	} {
		t.Run(c.name, func(t *testing.T) {
			answer = c.answer
			f.do(t, "POST", c.path, c.body).is(t, c.status, c.code, c.want)
		})
	}
}

// TestCommandOurs covers what the gateway did not have, or answered with a
// page of HTML or a timeout.
func TestCommandOurs(t *testing.T) {
	f := newFleet(t).listen(t)
	script := devicetest.NewScript()
	f.connect(t, robot, script)
	listed := len(script.Received())
	for _, c := range []struct {
		name, body string
		status     int
		code       devices.Code
		want       string
	}{
		{"notification", mcp(`{"method":"notifications/cancelled","params":{}}`), 200, CodeIgnored, `{"success":true,"data":{}}`},
		{"initialize", mcp(`{"method":"initialize","params":{"protocolVersion":"2024-11-05"}}`), 500, devices.CodeForbidden,
			failed("initialize is reserved for fleetd: it contains the photo address and token")},
		{"no method", mcp(`{}`), 500, devices.CodeBadRequest, failed("method is missing")},
		{"method no string", mcp(`{"method":5}`), 500, devices.CodeBadRequest, failed("method is missing")},
		{"payload no object", mcp(`"x"`), 500, devices.CodeBadRequest, failed("指令类型无效")},
		{"params no object", mcp(`{"method":"tools/list","params":[1]}`), 500, devices.CodeBadRequest,
			failed("params must be a JSON object or absent: devices drop other params without an answer")},
		{"call without a name", mcp(`{"method":"tools/call","params":{}}`), 500, devices.CodeBadRequest,
			failed(`tools/call needs params {\"name\":\"...\",\"arguments\":{...}}`)},
		{"null", `null`, 400, devices.CodeBadRequest, failed("the body is not usable: it must be a JSON object")},
		{"number", ` 5`, 400, devices.CodeBadRequest, failed("the body is not usable: it must be a JSON object")},
		{"cut", `{"type":"mcp"`, 400, devices.CodeBadRequest, failed("the body is not usable: not valid JSON")},
		{"cut array", `[1`, 400, devices.CodeBadRequest, failed("the body is not usable: not valid JSON")},
		{"two", `{}{}`, 400, devices.CodeBadRequest, failed("the body is not usable: not valid JSON")},
		{"not UTF-8", "{\"type\":\"\xff\"}", 400, devices.CodeBadRequest, failed("the body is not usable: JSON text is not valid UTF-8")},
		{"deep", mcp(`{"params":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`), 400, devices.CodeBadRequest,
			failed("the body is not usable: JSON nested deeper than 64 levels")},
		{"too large", `{"type":"` + strings.Repeat("x", BodyLimit) + `"}`, 413, devices.CodeTooLarge, failed("a request body may have 102400 bytes")},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.do(t, "POST", commandRobot, c.body).is(t, c.status, c.code, c.want)
		})
	}
	if got := script.Received(); len(got) != listed {
		t.Errorf("the device was asked %+v", got[listed:])
	}
	largest := `{"type":"mcp","payload":{"method":"tools/list"},"x":"`
	largest += strings.Repeat("x", BodyLimit-len(largest)-2) + `"}`
	if r := f.do(t, "POST", commandRobot, largest); r.status != 200 {
		t.Errorf("a body of the limit: %d %s", r.status, r.body)
	}
	if r := f.do(t, "POST", commandRobot, mcp(`{"method":"tools/list"}`), "Content-Type", "application/x-www-form-urlencoded"); r.status != 200 {
		t.Errorf("curl without a content type: %d %s", r.status, r.body)
	}
}

// TestCommandReachesDevice checks what is passed on: params untouched, the
// caller's own id not.
func TestCommandReachesDevice(t *testing.T) {
	f := newFleet(t).listen(t)
	script := devicetest.NewScript()
	f.connect(t, robot, script)
	f.do(t, "POST", commandRobot, mcp(`{"jsonrpc":"1.0","id":7,"method":"tools/list","params":{"withUserTools": true,"cursor":"a\u0062"}}`))
	got := script.Received()
	last := got[len(got)-1]
	if last.Method != "tools/list" || string(last.Params) != `{"withUserTools": true,"cursor":"a\u0062"}` || string(last.ID) == "7" {
		t.Errorf("the device received %s %s %s", last.ID, last.Method, last.Params)
	}
}

func TestCommandPages(t *testing.T) {
	f := newFleet(t).listen(t)
	script := devicetest.NewScript()
	f.connect(t, robot, script)
	script.Other = func(r devicetest.Request) string {
		if r.Method != "tools/list" {
			return ""
		}
		if strings.Contains(string(r.Params), `"cursor":"self.b"`) {
			return `"result":{"tools":[{"name":"self.b"}]}`
		}
		return `"result":{"tools":[{"name":"self.a"}],"nextCursor":"self.b"}`
	}
	var names []string
	cursor := ""
	for { // the loop of manager-api's getDeviceTools
		params := `{"withUserTools":true}`
		if cursor != "" {
			params = `{"cursor":"` + cursor + `","withUserTools":true}`
		}
		var page struct {
			Success bool
			Data    struct {
				Tools      []struct{ Name string }
				NextCursor string
			}
		}
		r := f.do(t, "POST", commandRobot, mcp(`{"jsonrpc":"2.0","id":2,"method":"tools/list","params":`+params+`}`))
		if err := json.Unmarshal([]byte(r.body), &page); err != nil || !page.Success {
			t.Fatalf("%v: %s", err, r.body)
		}
		for _, tool := range page.Data.Tools {
			names = append(names, tool.Name)
		}
		if cursor = page.Data.NextCursor; cursor == "" {
			break
		}
	}
	if strings.Join(names, " ") != "self.a self.b" {
		t.Errorf("tools %v", names)
	}
}

// TestCommandFindsByMAC gives the robot the names that consoles make up.
func TestCommandFindsByMAC(t *testing.T) {
	f := newFleet(t).listen(t)
	f.connect(t, robot, devicetest.NewScript())
	for _, clientID := range []string{"GID_other@@@aa_bb_cc_dd_ee_ff@@@aa_bb_cc_dd_ee_ff", "lichuang-dev@@@AA_BB_CC_DD_EE_FF@@@u", "x@@@aa_bb_cc_dd_ee_ff",
		"GID%20m5%20stack@@@aa:bb:cc:dd:ee:ff@@@u", "a%2Fb@@@aabbccddeeff@@@"} {
		if r := f.do(t, "POST", "/api/commands/"+clientID, mcp(callVolume)); r.status != 200 {
			t.Errorf("%s: %d %s", clientID, r.status, r.body)
		}
	}
}

func TestCommandTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		script := devicetest.NewScript()
		f.connect(t, robot, script)
		script.Call = func(string, json.RawMessage) string { return "" }
		begun := time.Now()
		f.do(t, "POST", commandRobot, mcp(callVolume)).is(t, 500, devices.CodeDeviceTimeout, failed("timeout"))
		if took := time.Since(begun); took != DefaultTimeout {
			t.Errorf("took %v", took)
		}
		f.do(t, "POST", commandRobot+"?strict=1", mcp(callVolume)).is(t, 504, devices.CodeDeviceTimeout, failed("timeout"))
		f.service.Close()
	})
}

func TestCommandConnectionEnds(t *testing.T) {
	for _, reason := range []devices.CloseReason{devices.CloseGone, devices.CloseSuperseded} {
		f := newFleet(t)
		script := devicetest.NewScript()
		l := f.connect(t, robot, script)
		script.Call = func(string, json.RawMessage) string {
			go l.Session.Close(reason)
			return ""
		}
		want := devices.CodeConnectionLost
		if reason == devices.CloseSuperseded {
			want = devices.CodeSuperseded
		}
		f.do(t, "POST", commandRobot, mcp(callVolume)).is(t, 500, want, failed("Connection closed"))
		f.do(t, "POST", commandRobot, mcp(callVolume)).is(t, 500, devices.CodeDeviceOffline, failed("设备未连接"))
	}
}

// stub is a core with configured results, for cases that are rare with a real one.
type stub struct {
	result devices.RPCResult
	err    error
}

func (s stub) Get(context.Context, devices.ID) (devices.View, error) { return devices.View{}, s.err }

func (s stub) Permit(context.Context, access.Principal, access.Scope, devices.ID) error { return nil }

func (s stub) NoteRefusal(access.Principal, string, devices.ID, error) {}

func (s stub) CallRPC(context.Context, devices.RPCCall) (devices.RPCResult, error) {
	return s.result, s.err
}

// TestCommandErrors has a row for every code, plain and strict.
func TestCommandErrors(t *testing.T) {
	for _, c := range []struct {
		err    devices.Error
		strict int
		text   string
	}{
		{devices.Error{Code: devices.CodeBadRequest, Detail: "d"}, 400, "d"},
		{devices.Error{Code: devices.CodeForbidden, Detail: "d"}, 403, "d"},
		{devices.Error{Code: devices.CodeToolDenied, Detail: "tool denied"}, 403, "tool denied"},
		{devices.Error{Code: devices.CodeConfirmation, Detail: "d"}, 428, "d"},
		{devices.Error{Code: devices.CodeInvalidArguments, Detail: "d"}, 422, "d"},
		{devices.Error{Code: devices.CodeDeviceUnknown, Detail: "d"}, 404, "设备未连接"},
		{devices.Error{Code: devices.CodeDeviceOffline, Detail: "d"}, 409, "设备未连接"},
		{devices.Error{Code: devices.CodeToolUnknown, Detail: "d"}, 404, "Unknown tool: self.audio_speaker.set_volume"},
		{devices.Error{Code: devices.CodeSuperseded, Detail: "d"}, 409, "Connection closed"},
		{devices.Error{Code: devices.CodeConnectionLost, Detail: "d"}, 502, "Connection closed"},
		{devices.Error{Code: devices.CodeDeviceBusy, Detail: "16 calls wait"}, 429, "16 calls wait"},
		{devices.Error{Code: devices.CodeDeviceError, Detail: "d"}, 502, "d"},
		{devices.Error{Code: devices.CodeDeviceTimeout, Detail: "d"}, 504, "timeout"},
		{devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "d"}, 503, "d"},
		{devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "d"}, 503, "设备未连接"},
	} {
		f := newFleet(t, func(o *Options) { o.Service = stub{err: &c.err} })
		f.do(t, "POST", commandRobot, mcp(callVolume)).is(t, 500, c.err.Code, failed(c.text))
		f.do(t, "POST", commandRobot+"?strict=1", mcp(callVolume)).is(t, c.strict, c.err.Code, failed(c.text))
	}
}

func TestCommandFault(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Service = stub{err: errors.New("secret inner words")} })
	r := f.do(t, "POST", commandRobot, mcp(callVolume))
	r.is(t, 500, devices.CodeInternal, failed("internal error; see the log of the node for "+r.header.Get(HeaderOperation)))
	if log := f.log.String(); !strings.Contains(log, "secret inner words") || !strings.Contains(log, "level=ERROR") || !strings.Contains(log, r.header.Get(HeaderOperation)) {
		t.Errorf("log %s", log)
	}
}

// TestCommandResults distinguishes a device's error from a result with the same text.
func TestCommandResults(t *testing.T) {
	const two = `{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"isError":true}`
	for _, c := range []struct {
		result, want string
		status       int
	}{
		{`{"content":[{"type":"text","text":"a \"b\""}],"isError":true}`, failed(`a \"b\"`), 500},
		{two, `{"success":true,"data":` + two + `}`, 200},
		{`{"content":[],"isError":true}`, `{"success":true,"data":{"content":[],"isError":true}}`, 200},
		{`{"content":[5],"isError":true}`, `{"success":true,"data":{"content":[5],"isError":true}}`, 200},
		{`{"content":[{"type":"image"}],"isError":true}`, `{"success":true,"data":{"content":[{"type":"image"}],"isError":true}}`, 200},
		{`{"isError":true}`, `{"success":true,"data":{"isError":true}}`, 200},
		{`{ "content" : [] }`, `{"success":true,"data":{ "content" : [] }}`, 200},
	} {
		f := newFleet(t, func(o *Options) { o.Service = stub{result: devices.RPCResult{Result: json.RawMessage(c.result)}} })
		if r := f.do(t, "POST", commandRobot, mcp(callVolume)); r.status != c.status || r.body != c.want {
			t.Errorf("%s: %d %s, want %s", c.result, r.status, r.body, c.want)
		}
	}
	f := newFleet(t, func(o *Options) {
		o.Service = stub{result: devices.RPCResult{Result: json.RawMessage(`{"isError":true,"content":[]}`)}}
	})
	f.do(t, "POST", commandRobot, mcp(`{"method":"x"}`)).is(t, 200, CodeOK, `{"success":true,"data":{"isError":true,"content":[]}}`)
}

// FuzzParseCommand compares with what encoding/json reads into a map, which
// takes the last of duplicate names too.
func FuzzParseCommand(f *testing.F) {
	for _, seed := range []string{mcp(callVolume), mcp("null"), `[]`, ``, `{"type":"mcp","payload":{"method":5,"params":null}}`, `{"clientIds":["a",5]}`, `{"deviceIds":[]}`, `{"type":"mcp","payload":{"method":"a","method":"b","params":[1]},"clientIds":null,"deviceIds":[1]}`, `{"clientIds":{}}`,
		"\b\t\n\f\r\x00\x1f\x7f\"\\<\xff"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c, err := parseCommand(body)
		compareCommand(t, body, c, err)
		var back string
		if text := string(body); json.Unmarshal(appendString(nil, text), &back) != nil || back != strings.ToValidUTF8(text, "\ufffd") {
			t.Errorf("%q is written as %s", text, appendString(nil, text))
		}
	})
}

func compareCommand(t *testing.T, body []byte, c command, err error) {
	list, statusErr := parseStatus(body)
	if jsontest.Depth(body) > jsonspan.MaxDepth || !utf8.Valid(body) {
		return
	}
	var members, payload map[string]json.RawMessage
	text := func(value json.RawMessage) (s string) {
		_ = json.Unmarshal(value, &s)
		return s
	}
	trimmed := bytes.Trim(body, " \t\r\n")
	object := json.Unmarshal(body, &members) == nil && members != nil
	array := json.Valid(body) && trimmed[0] == '[' // has no members in JavaScript
	if good := len(trimmed) == 0 || object || array; (err == nil) != good {
		t.Fatalf("%q: %v, want %t", body, err, good)
	}
	usable := object && text(members["type"]) == "mcp" && json.Unmarshal(members["payload"], &payload) == nil && payload != nil
	method, params := text(payload["method"]), string(payload["params"])
	if params == "null" {
		params = ""
	}
	if c.usable != usable || usable && (c.method != method || string(c.params) != params) {
		t.Errorf("%q is %+v, want %t %q %q", body, c, usable, method, params)
	}
	want := members["clientIds"]
	if want == nil || string(want) == "null" {
		want = members["deviceIds"]
	}
	if isList := len(want) > 0 && want[0] == '['; (statusErr == nil) != isList || isList && string(list) != string(want) {
		t.Errorf("%q lists %q, want %q: %v", body, list, want, statusErr)
	}
}
