package load

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Firmwares is how many distinct tool lists a fleet has.
const Firmwares = 20

// listLength is the number of tools in a list: three pages under the firmware's limit.
const (
	listLength = 50
	pageLimit  = 7960 // bytes of tools in one page; the firmware stops at 8000 with the envelope (mcp_server.cc:452-506)
)

// tool has the members of a firmware's tool in the firmware's order.
type tool struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	InputSchema json.RawMessage `json:"inputSchema"`
}

// ToolSetVolume is the tool that callers call, as firmware v2.4.2 describes it.
const ToolSetVolume = "self.audio_speaker.set_volume"

// ToolPages are the `tools/list` results of one firmware. All lists have the same length in bytes as long as the
// number of the firmware has as many digits; the first tool is the one that is called if callable is set.
func ToolPages(firmware int, callable bool) ([]string, error) {
	var pages []string
	var page []string
	size := 0
	for i := range listLength {
		t := tool{
			Name: fmt.Sprintf("self.module_%02d.set_property_%d", i/4, i%4),
			Description: fmt.Sprintf("Firmware 2.%d: set property %d of module %d. Use this tool when the user asks to change it; "+
				"read the current value with `self.get_device_status` first.", firmware, i%4, i/4),
			InputSchema: json.RawMessage(`{"type":"object","properties":{"value":{"type":"integer","minimum":0,"maximum":100},` +
				`"reason":{"type":"string"}},"required":["value"]}`),
		}
		if i == 0 && callable {
			t.Name, t.Description = ToolSetVolume, "Set the volume of the audio speaker. If the current volume is unknown, "+
				"you must call `self.get_device_status` tool first and then call this tool."
			t.InputSchema = json.RawMessage(`{"type":"object","properties":{"volume":{"type":"integer","minimum":0,"maximum":100}},"required":["volume"]}`)
		}
		text, err := json.Marshal(t)
		if err != nil {
			return nil, fmt.Errorf("tool %s: %w", t.Name, err)
		}
		if size+len(text)+1 > pageLimit {
			pages = append(pages, `{"tools":[`+strings.Join(page, ",")+`],"nextCursor":"`+t.Name+`"}`)
			page, size = nil, 0
		}
		page = append(page, string(text))
		size += len(text) + 1
	}
	return append(pages, `{"tools":[`+strings.Join(page, ",")+`]}`), nil
}

// ToolLists are the pages of every firmware.
func ToolLists(callable bool) ([][]string, error) {
	lists := make([][]string, Firmwares)
	for i := range lists {
		var err error
		if lists[i], err = ToolPages(i, callable); err != nil {
			return nil, err
		}
	}
	return lists, nil
}
