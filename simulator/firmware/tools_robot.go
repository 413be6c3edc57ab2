package firmware

import (
	"bytes"
	"encoding/base64"
	"image"
	"image/color"
	"image/png"
	"strconv"
	"strings"
	"time"
)

// robotMoves are the movements of a small walking robot, one tool each, described at length and in Chinese as the
// robots of the firmware tree do. Together they need several pages.
func robotMoves() []struct{ name, text string } {
	return []struct{ name, text string }{
		{"walk", "行走"}, {"turn", "转身"}, {"jump", "跳跃"}, {"swing", "左右摇摆"}, {"moonwalk", "太空步"}, {"bend", "弯曲身体"},
		{"shake_leg", "摇腿"}, {"updown", "上下运动"}, {"whirlwind_leg", "旋风腿"}, {"sit", "坐下"}, {"showcase", "连续展示动作"},
		{"hands_up", "举手"}, {"hands_down", "放手"}, {"hand_wave", "挥手"}, {"windmill", "大风车"}, {"takeoff", "起飞"},
		{"fitness", "健身"}, {"greeting", "打招呼"}, {"shy", "害羞"}, {"radio_calisthenics", "广播体操"}, {"magic_circle", "爱的魔力转圈圈"},
	}
}

// toolsRobot is an Otto-like robot: common tools, long movement tools, small devices on its body, tools that misbehave
// in the ways boards really do, helpers for tests, and the user-only tools.
func toolsRobot() []*tool {
	list := commonTools(true)
	for _, m := range robotMoves() {
		list = append(list, done("self.otto."+m.name,
			"执行机器人动作："+m.text+"。\n"+
				"steps: 动作步数，1-100，默认 3；\nspeed: 动作速度，100-3000，数值越小越快，默认 700；\n"+
				"direction: 方向，1=前进/左转，-1=后退/右转，0=左右同时；\n"+
				"注意：\"左右腿\"振荡时必须有一只脚保持在 90 度，否则会损坏机器人；路径 C:\\otto\\"+m.name+"\t仅用于调试。\n"+
				"完成所有动作后请单独调用 self.otto.home 复位。"+strings.Repeat("动作执行期间不要重复调用。", 4),
			ranged("steps", 1, 100).or(3), ranged("speed", 100, 3000).or(700), ranged("direction", -1, 1).or(1)))
	}
	list = append(list, robotBody()...)
	list = append(list, robotLosers()...)
	list = append(list, testTools()...)
	return append(list, userTools()...)
}

// robotBody is the rest of the body: servo settings, lamps, battery.
func robotBody() []*tool {
	return []*tool{
		done("self.otto.home", "复位：所有舵机回到中立位置"),
		done("self.otto.stop", "立即停止所有动作并复位"),
		done("self.otto.servo_sequences", "AI自定义动作编程（即兴动作）。\nsequence: 单个序列对象的 JSON 文本，"+
			strings.Repeat("每个动作对象包含舵机位置 s、移动速度 v、动作后延迟 d；示例：{\"a\":[{\"s\":{\"ll\":100},\"v\":1000}],\"d\":500}。\n", 20),
			str("sequence").orString(`{"a":[{"s":{"ll":90,"rl":90},"v":1000}]}`)),
		{
			name: "self.otto.set_trim", description: "校准单个舵机位置，设置将永久保存。\nservo_type: left_leg/right_leg/left_foot/right_foot；\ntrim_value: 微调值(-50到50度)",
			properties: []property{str("servo_type").orString("left_leg"), ranged("trim_value", -50, 50).or(0)},
			run: func(d *Device, args []arg) (outcome, error) {
				switch args[0].s {
				case "left_leg", "right_leg", "left_foot", "right_foot":
					d.setTrim(args[0].s, args[1].n)
					return text("舵机 " + args[0].s + " 微调设置为 " + strconv.Itoa(int(args[1].n)) + " 度，已永久保存")
				}
				// A failure in words is a normal result on these boards.
				return text("错误：无效的舵机类型，请使用: left_leg, right_leg, left_foot, right_foot")
			},
		},
		{name: "self.otto.get_trims", description: "获取当前的舵机微调设置",
			run: func(d *Device, _ []arg) (outcome, error) { return text(d.trimsJSON()) }},
		{name: "self.otto.get_status", description: "获取机器人状态，返回 moving 或 idle",
			run: func(*Device, []arg) (outcome, error) { return text("idle") }},
		{name: "self.battery.get_level", description: "获取机器人电池电量和充电状态",
			run: func(d *Device, _ []arg) (outcome, error) {
				return text(`{"level":` + strconv.Itoa(40+d.index%60) + `,"charging":false}`)
			}},
		done("self.light.set_rgb", "设置灯光颜色", ranged("r", 0, 255), ranged("g", 0, 255), ranged("b", 0, 255)),
		{name: "self.light.get_power", description: "Is the light on?",
			run: func(*Device, []arg) (outcome, error) { return flagText(true) }},
		done("self.lamp.turn_on", "Turn on the lamp"),
		done("self.lamp.turn_off", "Turn off the lamp"),
		{name: "self.led_strip.get_brightness", description: "Get the brightness of the led strip (0-8)",
			run: func(*Device, []arg) (outcome, error) { return text("4") }},
		done("self.electron.head_move", "头部动作。action: 1=抬头, 2=低头, 3=点头, 4=回中心, 5=连续点头",
			ranged("action", 1, 5).or(3), ranged("steps", 1, 10).or(1), ranged("speed", 500, 1500).or(1000), ranged("angle", 1, 15).or(5)),
	}
}

// robotLosers lose their own reply: the queued job closes the channel before the reply's turn comes.
func robotLosers() []*tool {
	return []*tool{
		{
			name: "self.system.set_aec", description: "Enable or disable echo cancellation.", properties: []property{boolean("enable")},
			run: func(d *Device, _ []arg) (outcome, error) {
				d.post(job{kind: jobDo, do: d.closeChannel})
				return flagText(true)
			},
		},
		{
			name: "self.system.reconfigure_wifi", description: "Reboot the device and enter WiFi configuration mode.\n**CAUTION** You must ask the user to confirm this action.",
			run: func(d *Device, _ []arg) (outcome, error) {
				d.post(job{kind: jobDo, do: func() {
					// Somebody sets the network up again within five seconds.
					d.closeChannel()
					d.resetProtocol()
					if d.sleep(5 * time.Second) {
						d.reboot()
					}
				}})
				return flagText(true)
			},
		},
	}
}

// testTools are for those who test a server: results of every kind and size on demand.
func testTools() []*tool {
	return []*tool{
		{
			name: "self.test.image", description: "Returns a picture.",
			run: func(*Device, []arg) (outcome, error) { return outcome{text: testImage(), image: true}, nil },
		},
		{
			name: "self.test.fail", description: "Always fails, with a message that breaks the JSON around it.",
			run: func(*Device, []arg) (outcome, error) {
				return outcome{}, toolError("no \"film\" left\nin C:\\camera")
			},
		},
		{
			name: "self.test.sleep", description: "Blocks the device for some milliseconds.",
			properties: []property{ranged("ms", 0, 120_000)}, blocking: true,
			run: func(d *Device, args []arg) (outcome, error) {
				timer := time.NewTimer(time.Duration(args[0].n) * time.Millisecond)
				defer timer.Stop()
				select {
				case <-timer.C:
				case <-d.fleet.ctx.Done():
				}
				return flagText(true)
			},
		},
		{
			name: "self.test.echo", description: "Returns its text.", properties: []property{str("text")},
			run: func(_ *Device, args []arg) (outcome, error) { return text(args[0].s) },
		},
		{
			name: "self.test.large", description: "Returns a text of so many bytes; above 65 KB the device cannot send it.",
			properties: []property{ranged("bytes", 0, 200_000)},
			run:        func(_ *Device, args []arg) (outcome, error) { return text(strings.Repeat("x", int(args[0].n))) },
		},
	}
}

// testImage is ImageContent::to_json: a JSON text that the result carries as a string.
func testImage() string {
	img := image.NewGray(image.Rect(0, 0, 8, 8))
	for i := range 8 {
		img.SetGray(i, i, color.Gray{Y: 255})
	}
	var out bytes.Buffer
	// Encoding eight by eight pixels into memory cannot fail.
	_ = png.Encode(&out, img)
	return `{"type":"image","mimeType":"image/png","data":"` + base64.StdEncoding.EncodeToString(out.Bytes()) + `"}`
}

func (d *Device) setTrim(servo string, v int32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.trims {
		if d.trims[i].servo == servo {
			d.trims[i].value = v
			return
		}
	}
	d.trims = append(d.trims, trim{servo, v})
}

func (d *Device) trimsJSON() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := []byte("{")
	for i, servo := range []string{"left_leg", "right_leg", "left_foot", "right_foot"} {
		v := int32(0)
		for _, t := range d.trims {
			if t.servo == servo {
				v = t.value
			}
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(appendJSONString(b, servo), ':'), int64(v), 10)
	}
	return string(append(b, '}'))
}
