package devicetest

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// brief bounds a request that must be refused without the device.
const brief = 500 * time.Millisecond

// textChecked sends arguments that the device's parser reads differently, so that fleetd must refuse them: the parser
// drops a message with an unpaired surrogate, cuts text at U+0000, and takes names that differ only in case for equal.
func textChecked(t *testing.T, f Frontend) {
	script := NewScript()
	f.Online(t, testID, "c1", script)
	before := len(script.Received())
	refused := func(what string, err error, pointer string) {
		t.Helper()
		var e *devices.Error
		if err != nil {
			e = devices.AsError(err)
		}
		if e == nil || e.Code != devices.CodeInvalidArguments || len(e.Faults) != 1 || e.Faults[0].Pointer != pointer {
			t.Errorf("%s: %+v, want it refused at %s", what, err, pointer)
		}
	}
	for args, pointer := range map[string]string{
		`{"volume":5,"x":"a\ud83d"}`: "/x", `{"volume":5,"a":["b",{"c/d":"\udc00\ud83d"}]}`: "/a/1/c~1d", `{"volume":5,"x":"a\u0000b"}`: "/x",
		`{"volume":5,"\ud83d":1}`: "/\uFFFD", `{"volume":5,"volume\u0000x":1}`: "/volume\uFFFDx", `{"Volume":7,"volume":5}`: "/Volume",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), brief)
		_, err := f.Service.CallTool(ctx, devices.ToolCall{Principal: Admin, Device: testID, Tool: volume, Arguments: json.RawMessage(args)})
		refused(args, err, pointer)
		_, err = f.Service.CallRPC(ctx, devices.RPCCall{Principal: Admin, Device: testID, Method: "tools/call", Params: json.RawMessage(`{"name":"` + volume + `","arguments":` + args + `}`)})
		refused("raw: "+args, err, pointer)
		cancel()
	}
	for _, params := range []string{`{"cursor":"\ud83d"}`, `{"cursor":"a\u0000"}`} {
		ctx, cancel := context.WithTimeout(t.Context(), brief)
		_, err := f.Service.CallRPC(ctx, devices.RPCCall{Principal: Admin, Device: testID, Method: "tools/list", Params: json.RawMessage(params)})
		refused(params, err, "/cursor")
		cancel()
	}
	if after := len(script.Received()); after != before {
		t.Errorf("the device got %d requests", after-before)
	}
	if _, err := call(f.Service, volume, `{"volume":5,"x":"\ud83d\ude00 \\ud83d \\u0000"}`, 5*time.Second); err != nil {
		t.Errorf("a complete surrogate pair and escaped backslashes: %v", err)
	}
}

// textArrives sends messages with such faults. In text for people each fault arrives as U+FFFD. In the other members of
// a message a fault is refused.
func textArrives(t *testing.T, f Frontend) {
	script := NewScript()
	f.withOpenAudio(t, script)
	for _, kind := range []string{`"alert","status":"s","emotion":"e","message"`, `"tts","state":"sentence_start","text"`, `"stt","text"`} {
		before := len(script.Messages())
		f.tell(t, `{"type":`+kind+`:"a\ud83d b\u0000c \ud83d\ude00 \\ud83d"}`)
		Eventually(t, "the device has the text", func() bool { return len(script.Messages()) > before })
		if got := script.Messages()[before]; !strings.Contains(got, `:"a\ufffd b\ufffdc \ud83d\ude00 \\ud83d"`) {
			t.Errorf("the device receives %s", got)
		}
	}
	before := len(script.Messages())
	for body, code := range map[string]devices.Code{
		`{"type":"custom","payload":{"a":"\ude00"}}`:                                  devices.CodeInvalidArguments,
		`{"type":"custom","payload":{"a":"\u0000"}}`:                                  devices.CodeInvalidArguments,
		`{"type":"tts","State":1,"state":"start"}`:                                    devices.CodeBadRequest,
		`{"type":"alert","status":"s","Message":1,"message":"m","emotion":"e"}`:       devices.CodeBadRequest,
		`{"type":"alert","status":"s","message":"m","emotion\u0000":1,"emotion":"e"}`: devices.CodeBadRequest,
	} {
		err := f.Service.SendMessage(t.Context(), devices.Message{Principal: Admin, Device: testID, Body: json.RawMessage(body)})
		switch {
		case err == nil, devices.AsError(err).Code != code:
			t.Errorf("%s: %v, want %q", body, err, code)
		case code == devices.CodeInvalidArguments && devices.AsError(err).Faults[0].Pointer != "/payload/a":
			t.Errorf("%s: %+v", body, devices.AsError(err).Faults)
		}
	}
	if after := len(script.Messages()); after != before {
		t.Errorf("the device got %d messages", after-before)
	}
}
