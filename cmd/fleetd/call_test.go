package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const toolList = `{"catalog":"ab12","state":"ready","partial":false,"items":[
	{"name":"self.audio_speaker.set_volume","description":"Set the volume.\nSecond line.","inputSchema":{"type":"object","properties":{"volume":{"type":"integer","minimum":0,"maximum":100}},"required":["volume"]}},
	{"name":"self.otto.action","description":"Move \u001b[31mnow","inputSchema":{"type":"object","properties":{
		"steps":{"type":"integer","default":3,"minimum":1},"action":{"type":"string","default":"sit"},"fast":{"type":"boolean","description":"Twice the speed"},
		"angle":{"type":"number","maximum":1.5},"path":{"type":"array"},"extra":{},"mode":{"type":["integer","string"],"enum":[1,"a"]},"what":{"type":7}},"required":["fast"]}},
	{"name":"self.reboot","inputSchema":{"type":"object","properties":{}},"annotations":{"audience":["user"]}}
]}`

func TestTools(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/devices/d/tools":           toolList,
		"GET /v1/devices/d/tools?user=true": `{"catalog":"ab12","state":"stale","items":[{"name":"self.reboot","annotations":{"audience":["user"]}},"odd\u0007"]}`,
		"GET /v1/devices/none/tools":        `{"catalog":"","state":"none","items":[]}`,
		"GET /v1/devices/part/tools":        `{"catalog":"x","state":"ready","partial":true,"items":[]}`,
		"GET /v1/devices/bare/tools":        `{"catalog":"x","state":"ready","items":[]}`,
	})
	f.run("tools", "d").is(t, exitOK, strings.Join([]string{
		"self.audio_speaker.set_volume",
		"    Set the volume.",
		"    volume  integer  0..100  required",
		"",
		"self.otto.action",
		"    Move now",
		`    steps   integer         from 1          default 3`,
		`    action  string          -               default "sit"`,
		`    fast    boolean         -               required  Twice the speed`,
		`    angle   number          up to 1.5       optional`,
		`    path    array           -               optional`,
		`    extra   any             -               optional`,
		`    mode    integer|string  one of [1,"a"]  optional`,
		`    what    any             -               optional`,
		"",
		"self.reboot  (user only)",
		"",
	}, "\n"), "")
	f.run("tools", "d", "--user").is(t, exitOK, "self.reboot  (user only)\n\n(unreadable) \"odd\\u0007\"\n",
		"fleetd: these tools are known from before; the device has not confirmed them on its present connection\n")
	f.run("tools", "none").is(t, exitOK, "", "fleetd: this device does not speak MCP\n")
	f.run("tools", "part").is(t, exitOK, "", "fleetd: the device's list could not be read to its end; it may have more tools than these, and they can be called\n")
	f.run("tools", "bare").is(t, exitOK, "", "fleetd: this device has no tools\n")
	f.run("tools", "bare", "--json").is(t, exitOK, "{\n  \"catalog\": \"x\",\n  \"state\": \"ready\",\n  \"items\": []\n}\n", "")
}

func TestCallArguments(t *testing.T) {
	const device = "aa:bb:cc:dd:ee:01"
	cases := []struct {
		name   string
		tool   string
		args   []string
		schema bool   // whether the tools are asked for
		body   string // of the call; empty: refused before it
		err    string
	}{
		{"none", "self.reboot", nil, false, `{"arguments":{}}`, ""},
		{"integer", "self.audio_speaker.set_volume", []string{"volume=50"}, true, `{"arguments":{"volume":50}}`, ""},
		{"big integer", "self.audio_speaker.set_volume", []string{"volume=+900719925474099300"}, true, `{"arguments":{"volume":900719925474099300}}`, ""},
		{"wrong integer", "self.audio_speaker.set_volume", []string{"volume=loud"}, true, "", `the argument volume must be a whole number, not "loud"`},
		{"fraction", "self.audio_speaker.set_volume", []string{"volume=1.5"}, true, "", `the argument volume must be a whole number, not "1.5"`},
		{"every type", "self.otto.action", []string{"steps=-7", "action=12", "fast=true", "angle=1.50", "path=[1, 2]", "extra=on", "mode=a", "what=5"}, true,
			`{"arguments":{"action":"12","angle":1.50,"extra":"on","fast":true,"mode":"a","path":[1,2],"steps":-7,"what":5}}`, ""},
		{"either type", "self.otto.action", []string{"mode=5"}, true, `{"arguments":{"mode":5}}`, ""},
		{"empty text with signs", "self.otto.action", []string{"action=", "extra=a=b<c>&"}, true, `{"arguments":{"action":"","extra":"a=b\u003cc\u003e\u0026"}}`, ""},
		{"wrong boolean", "self.otto.action", []string{"fast=yes"}, true, "", `the argument fast must be true or false, not "yes"`},
		{"wrong number", "self.otto.action", []string{"angle=true"}, true, "", `the argument angle must be a number, not "true"`},
		{"empty number", "self.otto.action", []string{"angle="}, true, "", `the argument angle must be a number, not ""`},
		{"wrong array", "self.otto.action", []string{"path={}"}, true, "", `the argument path must be a JSON array, not "{}"`},
		{"unknown", "self.audio_speaker.set_volume", []string{"level=5"}, true, "", "the tool self.audio_speaker.set_volume has no argument level; it takes volume"},
		{"unknown to a tool without", "self.reboot", []string{"now=1"}, true, "", "the tool self.reboot has no argument now; it takes none"},
		{"raw JSON needs no schema", "self.otto.action", []string{`level:={"a":[1]}`}, false, `{"arguments":{"level":{"a":[1]}}}`, ""},
		{"object", "self.otto.action", []string{"--args", `{"steps":3,"fast":false}`, "fast=true"}, true, `{"arguments":{"fast":true,"steps":3}}`, ""},
		{"timeout", "self.reboot", []string{"--timeout", "90s"}, false, `{"arguments":{},"timeout":"1m30s"}`, ""},
		{"tool not in the list", "self.other", []string{"n=5", "s=five"}, true, `{"arguments":{"n":5,"s":"five"}}`, ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			call := "POST /v1/devices/" + device + "/tools/" + tc.tool + "/call"
			f := newAPI(t, map[string]string{
				"GET /v1/devices/" + device + "/tools?user=true": toolList,
				call: `{"content":[{"type":"text","text":"true"}],"isError":false,"duration_ms":3,"node":"n-1"}`,
			})
			got := f.run(append([]string{"call", device, tc.tool}, tc.args...)...)
			var want []string
			if tc.schema {
				want = append(want, "GET /v1/devices/"+device+"/tools?user=true")
			}
			if tc.err == "" {
				want = append(want, call+" "+tc.body)
				got.is(t, exitOK, "true\n", "")
			} else {
				got.is(t, exitFailed, "", "fleetd: "+tc.err+"\n")
			}
			if asked := f.requests(); fmt.Sprintf("%q", asked) != fmt.Sprintf("%q", want) {
				t.Errorf("asked %q\nwant  %q", asked, want)
			}
		})
	}
}

func TestCallOutcomes(t *testing.T) {
	const call = "POST /v1/devices/d/tools/t/call"
	cases := []struct {
		name           string
		status         int
		answer         string
		args           []string
		code           int
		stdout, stderr string
	}{
		{"several items", 0, `{"content":[{"type":"text","text":"one\ntwo\u001b[2J\n"},{"type":"resource","uri":"x:y"}],"isError":false}`, nil,
			exitOK, "one\ntwo\n" + `{"type":"resource","uri":"x:y"}` + "\n", ""},
		{"nothing", 0, `{"content":[],"isError":false}`, nil, exitOK, "", ""},
		{"tool error", 0, `{"content":[{"type":"text","text":"unknown theme"}],"isError":true}`, nil,
			exitTool, "unknown theme\n", "fleetd: the tool failed on the device\n"},
		{"restarting", 0, `{"content":[],"isError":false,"outcome":"restarting"}`, nil, exitOK, "the device is restarting\n", ""},
		{"raw", 0, `{"content":[{"type":"text","text":"x"}],"isError":true,"later":1.50}`, []string{"--json"},
			exitTool, "{\n  \"content\": [\n    {\n      \"type\": \"text\",\n      \"text\": \"x\"\n    }\n  ],\n  \"isError\": true,\n  \"later\": 1.50\n}\n",
			`{"error":"the tool failed on the device","exit":3}` + "\n"},
		{"image on a terminal", 0, `{"content":[{"type":"image","mimeType":"image/jpeg","data":"/9j/"}],"isError":false}`, nil,
			exitOK, "(image, image/jpeg, 3 bytes: give -o FILE to keep it)\n", ""},
		{"broken image", 0, `{"content":[{"type":"image","data":"%"}],"isError":false}`, nil,
			exitRefused, "", "fleetd: read the image the device sent: illegal base64 data at input byte 0\n"},
		{"no image", 0, `{"content":[{"type":"text","text":"x"}],"isError":false}`, []string{"-o", "x.jpg"},
			exitFailed, "x\n", "fleetd: the answer holds no image, so x.jpg was not written\n"},
		{"offline", 409, `{"title":"Conflict","code":"device_offline","detail":"d is known but not connected"}`, nil,
			exitRefused, "", "fleetd: d is known but not connected (device_offline)\n"},
		{"invalid", 422, `{"title":"Unprocessable Entity","code":"invalid_arguments","detail":"wrong arguments","errors":[{"pointer":"/volume","detail":"is required"}]}`, nil,
			exitRefused, "", "fleetd: wrong arguments: /volume is required (invalid_arguments)\n"},
		{"timeout", 504, `{"title":"Gateway Timeout","code":"device_timeout","detail":"d did not answer in 30s","outcome":"unknown"}`, nil,
			exitTimeout, "", "fleetd: d did not answer in 30s (device_timeout)\n"},
		{"unauthorized", 401, `{"title":"Unauthorized","code":"unauthorized"}`, nil, exitRefused, "", "fleetd: Unauthorized; this command sent the token of --token or FLEETD_TOKEN (unauthorized)\n"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			f := newAPI(t, map[string]string{call: tc.answer})
			f.status[call] = tc.status
			f.run(append([]string{"call", "d", "t"}, tc.args...)...).is(t, tc.code, tc.stdout, tc.stderr)
		})
	}
	f := newAPI(t, map[string]string{"GET /v1/devices/d/tools?user=true": `{"code":"device_unknown","detail":"no device is called d"}`})
	f.status["GET /v1/devices/d/tools?user=true"] = 404
	f.run("call", "d", "t", "a=1").is(t, exitRefused, "", "fleetd: no device is called d; `fleetd devices` lists them (device_unknown)\n")
}

func TestCallImages(t *testing.T) {
	f := newAPI(t, map[string]string{"POST /v1/devices/d/tools/t/call": `{"content":[{"type":"text","text":"two"},
		{"type":"image","image":"{\"type\":\"image\",\"mimeType\":\"image/png\",\"data\":\"iVBORw==\"}"},{"type":"image","mimeType":"image/jpeg","data":"/9j/"}],"isError":false}`})
	dir := t.TempDir()
	path := filepath.Join(dir, "photo.jpg")
	second := filepath.Join(dir, "photo-2.jpg")
	f.run("call", "d", "t", "-o", path).is(t, exitOK, "two\n"+path+": image/png, 4 bytes\n"+second+": image/jpeg, 3 bytes\n", "")
	for name, want := range map[string]string{path: "\x89PNG", second: "\xff\xd8\xff"} {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	got := f.run("call", "d", "t", "-o", filepath.Join(dir, "none", "x.jpg"))
	if got.code != exitFailed || !strings.HasPrefix(got.stderr, "fleetd: write the image: open ") {
		t.Errorf("unwritable: %+v", got)
	}
}
