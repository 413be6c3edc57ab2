package firmware

import (
	"slices"
	"strconv"
	"strings"
)

const takePhotoName = "self.camera.take_photo"

// commonTools is McpServer::AddCommonTools (main/mcp_server.cc:33-126) for a board with backlight and LVGL display.
func commonTools(checkTheme bool) []*tool {
	return []*tool{
		{
			name: "self.get_device_status",
			description: "Provides the real-time information of the device, including the current status of the audio speaker, screen, battery, network, etc.\n" +
				"Use this tool for: \n" +
				"1. Answering questions about current condition (e.g. what is the current volume of the audio speaker?)\n" +
				"2. As the first step to control the device (e.g. turn up / down the volume of the audio speaker, etc.)",
			run: func(d *Device, _ []arg) (outcome, error) { return text(d.statusJSON()) },
		},
		{
			name:        "self.audio_speaker.set_volume",
			description: "Set the volume of the audio speaker. If the current volume is unknown, you must call `self.get_device_status` tool first and then call this tool.",
			properties:  []property{ranged("volume", 0, 100)},
			run: func(d *Device, args []arg) (outcome, error) {
				d.mu.Lock()
				d.volume = args[0].n
				d.mu.Unlock()
				return flagText(true)
			},
		},
		{
			name:        "self.screen.set_brightness",
			description: "Set the brightness of the screen.",
			properties:  []property{ranged("brightness", 0, 100)},
			run: func(d *Device, args []arg) (outcome, error) {
				d.mu.Lock()
				d.brightness = args[0].n
				d.mu.Unlock()
				return flagText(true)
			},
		},
		{
			name:        "self.screen.set_theme",
			description: "Set the theme of the screen. The theme can be `light` or `dark`.",
			properties:  []property{str("theme")},
			run: func(d *Device, args []arg) (outcome, error) {
				known := args[0].s == "light" || args[0].s == "dark"
				if checkTheme && !known {
					return flagText(false)
				}
				d.mu.Lock()
				d.theme = args[0].s
				d.mu.Unlock()
				return flagText(true)
			},
		},
	}
}

// cameraTool is self.camera.take_photo with the wording of the generation.
func cameraTool(lead string) *tool {
	return &tool{
		name: takePhotoName,
		description: lead + "\nArgs:\n  `question`: The question that you want to ask about the photo.\nReturn:\n" +
			"  A JSON object that provides the photo information.",
		properties: []property{str("question")},
		blocking:   true,
		run:        func(d *Device, args []arg) (outcome, error) { return d.takePhoto(args[0].s) },
	}
}

// statusJSON is WifiBoard::GetDeviceStatusJson (main/boards/common/wifi_board.cc:298-354).
func (d *Device) statusJSON() string {
	d.mu.Lock()
	volume, brightness, theme := d.volume, d.brightness, d.theme
	d.mu.Unlock()
	signal := "weak"
	switch rssi := d.rssi(); {
	case rssi >= -60:
		signal = "strong"
	case rssi >= -70:
		signal = "medium"
	}
	b := append(make([]byte, 0, 256), `{"audio_speaker":{"volume":`...)
	b = strconv.AppendInt(b, int64(volume), 10)
	b = append(b, `},"screen":{"brightness":`...)
	b = strconv.AppendInt(b, int64(brightness), 10)
	b = appendJSONString(append(b, `,"theme":`...), theme)
	b = append(b, `},"battery":{"level":`...)
	b = strconv.AppendInt(b, int64(40+d.index%60), 10)
	b = append(b, `,"charging":false},"network":{"type":"wifi","ssid":`...)
	b = appendJSONString(b, d.ssid())
	return string(append(b, `,"signal":"`+signal+`"}}`...))
}

// tools24 is the inventory of v2.4.2 on a Wi-Fi board with LVGL display, backlight and camera.
func tools24() []*tool {
	list := append(commonTools(true),
		cameraTool("Always remember you have a camera. If the user asks you to see something, use this tool to take a photo and then explain it."))
	return append(list, userTools()...)
}

// tools21 is v2.1.0 on a board without camera.
func tools21() []*tool { return append(commonTools(true), userTools()...) }

// tools19 is v1.9.4 on a small rover: no user-only tools.
func tools19() []*tool {
	list := append(commonTools(false), cameraTool("Take a photo and explain it. Use this tool after the user asks you to see something."))
	for _, move := range []struct{ name, text string }{
		{"go_forward", "前进"}, {"go_back", "后退"}, {"turn_left", "左转"}, {"turn_right", "右转"},
	} {
		list = append(list, done("self.chassis."+move.name, move.text))
	}
	return append(list,
		&tool{name: "self.chassis.get_light_mode", description: "获取灯光效果编号",
			run: func(*Device, []arg) (outcome, error) { return text("1") }},
		done("self.chassis.switch_light_mode", "打开灯光效果", ranged("light_mode", 1, 6)),
	)
}

// done is a tool that moves something and returns true.
func done(name, description string, properties ...property) *tool {
	return &tool{name: name, description: description, properties: properties,
		run: func(*Device, []arg) (outcome, error) { return flagText(true) }}
}

// withOversizeTool puts a tool into the middle that no page can carry: its JSON is over 7959 bytes.
func withOversizeTool(list []*tool) []*tool {
	out := make([]*tool, 0, len(list)+1)
	for _, t := range list {
		dup := *t
		out = append(out, &dup)
	}
	return slices.Insert(out, len(out)/2, done("self.test.oversize", strings.Repeat("too long to be listed ", 400)))
}
