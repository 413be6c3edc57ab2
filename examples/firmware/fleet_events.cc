// See fleet_events.h.
//
// SPDX-License-Identifier: Apache-2.0

#include "fleet_events.h"

#include <esp_log.h>

#include "application.h"

#define TAG "FleetEvents"

namespace fleet {

namespace {

// The firmware's WebSocket cannot send 65,536 bytes or more and ends the session when asked to; the envelope around
// the payload needs some of that. A notification this long is a mistake anyway.
constexpr size_t kMaxPayload = 16 * 1024;

}  // namespace

void Notify(const std::string& name, cJSON* params) {
    // cJSON escapes quotes, backslashes and line breaks. Text glued together by hand does not, and one quote in it
    // makes the whole message invalid.
    cJSON* root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "jsonrpc", "2.0");
    cJSON_AddStringToObject(root, "method", ("notifications/" + name).c_str());
    if (params != nullptr) {
        cJSON_AddItemToObject(root, "params", params);
    }
    char* text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);  // params included
    if (text == nullptr) {
        ESP_LOGE(TAG, "No memory for notification %s", name.c_str());
        return;
    }
    std::string payload(text);
    cJSON_free(text);
    if (payload.size() > kMaxPayload) {
        ESP_LOGE(TAG, "Notification %s has %u bytes, not sent", name.c_str(), (unsigned)payload.size());
        return;
    }

    // Only the payload: the firmware adds the session id and wraps it as {"type":"mcp"}. SendMcpMessage copies the
    // text and leaves the sending to the main loop (main/application.cc:1141, v2.4.2).
    Application::GetInstance().SendMcpMessage(payload);
}

bool Threshold::Crossed(double reading) {
    if (above_) {
        above_ = !(reading <= low_);
        return false;
    }
    above_ = reading >= high_;
    return above_;
}

}  // namespace fleet
