package firmware

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// glyphMode is what a hello has about pushed glyphs: nothing before v2.4.0, then always true or false.
type glyphMode uint8

const (
	glyphAbsent glyphMode = iota
	glyphOff
	glyphOn
)

// Profile is one kind of device: board, firmware generation and tools. Profiles are shared and never change.
type Profile struct {
	ImageSize int // bytes that the images of Image have at least

	name     string
	board    string
	maker    string
	version  string
	language string
	chip     string
	idf      string
	compiled string
	// withDisplay and withMaker: the OTA body grew with the firmware (v2.0.1 and v2.4.2).
	withDisplay, withMaker bool
	width, height          int
	glyph                  glyphMode
	// serverAEC: builds with echo cancelling on the server announce it first.
	serverAEC bool
	// overtaking is the reply order since v2.1.0: everything but tool results passes waiting tool calls.
	overtaking bool
	// userTools: v1.9 has neither user-only tools nor withUserTools.
	userTools bool
	// cameraText: v1.9 reports camera failures as a successful text.
	cameraText bool
	// ttsNeedsState: up to v2.3.0 a tts message without state is a null dereference.
	ttsNeedsState bool
	// laxUDP: up to v2.3.0 a server hello is not validated and packets are checked less.
	laxUDP bool
	// laxGoodbye: before v2.3.0 a server goodbye needs no session id.
	laxGoodbye bool
	// echoGoodbye: up to v2.1.0 a server goodbye is answered with one.
	echoGoodbye bool
	// cutsTail: up to v2.1.0 tts stop throws queued audio away; waitsTail: v2.2 and v2.3 block the main loop for it.
	cutsTail, waitsTail bool
	// serials: devices with an even index carry an eFuse serial number.
	serials bool
	// quotedSSID: one device in eight sits in a network whose name breaks the unescaped OTA body.
	quotedSSID bool
	// foreignEvery: after so many tool calls a reply nobody asked for is sent, as robots with a local control port do.
	foreignEvery int
	tools        *toolset
	oversize     *toolset
	factory      *program // what a device runs before any upgrade
	table        string   // the partition table as JSON
	hostile      *Profile // with the texts of the fault hostile-text
}

// Name is the name by which ParseProfiles finds the profile.
func (p *Profile) Name() string { return p.name }

// Board is the name of the profile's board.
func (p *Profile) Board() string { return p.board }

// Version is that of the image that the profile's devices have from the factory.
func (p *Profile) Version() string { return p.version }

// catalog is all profiles, the newest firmware first.
type catalog []*Profile

// profiles has every profile once; all devices share them. This list, and a file with the tools, are all that a new
// profile touches.
var profiles = sync.OnceValue(func() catalog {
	c := catalog{
		{
			name: "fw-2.4", board: "lichuang-dev", version: "2.4.2", language: "zh-CN", chip: "esp32s3", idf: "v5.5.2",
			compiled: "Aug  8 2026T08:40:00Z", withDisplay: true, withMaker: true, width: 320, height: 240,
			glyph: glyphOn, overtaking: true, userTools: true, serials: true,
			tools: newToolset(tools24()),
		},
		{
			name: "fw-2.1", board: "esp-box-3", version: "2.1.0", language: "en-US", chip: "esp32s3", idf: "v5.5.1",
			compiled: "Dec 17 2025T10:02:31Z", withDisplay: true, width: 320, height: 240,
			overtaking: true, userTools: true, ttsNeedsState: true,
			laxUDP: true, laxGoodbye: true, echoGoodbye: true, cutsTail: true,
			tools: newToolset(tools21()),
		},
		{
			name: "fw-1.9", board: "esp-sparkbot", version: "1.9.4", language: "zh-CN", chip: "esp32s3", idf: "v5.4.1",
			compiled: "Oct 12 2025T03:11:09Z", width: 240, height: 240,
			cameraText: true, ttsNeedsState: true,
			laxUDP: true, laxGoodbye: true, echoGoodbye: true, cutsTail: true,
			tools: newToolset(tools19()),
		},
		{
			// Builds before v1.8.0 restart after a failed upgrade.
			name: "fw-1.7", board: "esp32s3-korvo2-v3", version: "1.7.6", language: "zh-CN", chip: "esp32s3", idf: "v5.4.1",
			compiled: "Jul  4 2025T02:15:44Z", width: 240, height: 240,
			cameraText: true, ttsNeedsState: true,
			laxUDP: true, laxGoodbye: true, echoGoodbye: true, cutsTail: true,
			tools: newToolset(commonTools(false)),
		},
		{
			name: "robot", board: "otto-robot", version: "2.2.6", language: "zh-CN", chip: "esp32s3", idf: "v5.5.2",
			compiled: "Mar  3 2026T16:20:45Z", withDisplay: true, width: 240, height: 240,
			overtaking: true, userTools: true, ttsNeedsState: true, quotedSSID: true, foreignEvery: 8,
			laxUDP: true, laxGoodbye: true, waitsTail: true,
			tools: newToolset(toolsRobot()),
		},
	}
	for _, p := range c {
		p.factory, p.table = p.program(p.version), p.tableJSON()
		p.oversize = newToolset(withOversizeTool(p.tools.list))
		p.hostile = p.withHostileText()
	}
	return c
})

func (c catalog) names() (names []string) {
	for _, p := range c {
		names = append(names, p.name)
	}
	return names
}

// ParseProfiles reads a comma separated list of names of profiles.
func ParseProfiles(list string) ([]*Profile, error) {
	var out []*Profile
	for name := range strings.SplitSeq(list, ",") {
		i := slices.IndexFunc(profiles(), func(p *Profile) bool { return p.name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("%q is unknown; known are %s", name, strings.Join(profiles().names(), ", "))
		}
		out = append(out, profiles()[i])
	}
	return out, nil
}

// Hello is what a device of this profile sends first over a WebSocket, and at the beginning of a conversation over MQTT.
func (p *Profile) Hello(l Login) string {
	if l.URL == "" {
		return p.helloUDP()
	}
	return p.helloText(l.Version)
}

// helloText is GetHelloMessage (main/protocols/websocket_protocol.cc:198-222, protocol.cc:8-24).
func (p *Profile) helloText(version int32) string {
	b := []byte(`{"type":"hello","version":`)
	b = strconv.AppendInt(b, int64(version), 10)
	b = p.appendFeatures(append(b, ','))
	return string(append(b, `,"transport":"websocket",`+micParams+`}`...))
}

// helloUDP is GetHelloMessage of the MQTT protocol (main/protocols/mqtt_protocol.cc:351-375): the version is fixed and
// the members are in another order.
func (p *Profile) helloUDP() string {
	b := p.appendFeatures([]byte(`{"type":"hello","version":3,"transport":"udp",`))
	return string(append(b, `,`+micParams+`}`...))
}

const micParams = `"audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}`

func (p *Profile) appendFeatures(b []byte) []byte {
	b = append(b, `"features":{`...)
	if p.serverAEC {
		b = append(b, `"aec":true,`...)
	}
	b = append(b, `"mcp":true`...)
	switch p.glyph {
	case glyphOff:
		b = append(b, `,"glyph_push":false`...)
	case glyphOn:
		b = append(b, `,"glyph_push":true},"text_font":{"bundle":"noto-v1","charset":"common","size":20,"bpp":4`...)
	}
	return append(b, '}')
}

// systemInfo describes one device for the OTA body.
type systemInfo struct {
	profile  *Profile
	runs     *program
	slot     int
	mac      string
	clientID string
	ssid     string
	rssi     int
	channel  int
	ip       string
}

// json is Board::GetSystemInfoJson (main/boards/common/board.cc:110-177) with WifiBoard::GetBoardJson. It is a plain
// concatenation: a quote in the SSID makes it invalid JSON, as on the device.
func (s systemInfo) json() string {
	p := s.profile
	b := make([]byte, 0, 1024)
	b = append(b, `{"version":2,"language":"`+p.language+`","flash_size":16777216,"minimum_free_heap_size":"123456","mac_address":"`...)
	b = append(b, s.mac+`","uuid":"`+s.clientID+`","chip_model_name":"`+p.chip+`",`...)
	b = append(b, `"chip_info":{"model":9,"cores":2,"revision":`+strconv.Itoa(chipRevision)+`,"features":18},"application":{"name":"`+s.runs.project+`","version":"`...)
	b = append(b, s.runs.version+`","compile_time":"`+s.runs.compiled+`","idf_version":"`+s.runs.idf+`","elf_sha256":"`+s.runs.elf+`"},`...)
	b = append(b, `"partition_table": `+p.table+`,"ota":{"label":"ota_`+strconv.Itoa(s.slot)+`"},`...)
	if p.withDisplay {
		b = append(b, `"display":{"monochrome":false,"width":`+strconv.Itoa(p.width)+`,"height":`+strconv.Itoa(p.height)+`},`...)
	}
	b = append(b, `"board":{"type":"`+s.runs.board+`","name":"`+s.runs.board+`",`...)
	if p.withMaker {
		b = append(b, `"manufacturer":"`+p.maker+`",`...)
	}
	b = append(b, `"ssid":"`+s.ssid+`","rssi":`+strconv.Itoa(s.rssi)+`,"channel":`+strconv.Itoa(s.channel)+`,"ip":"`+s.ip+`",`...)
	return string(append(b, `"mac":"`+s.mac+`"}}`...))
}
